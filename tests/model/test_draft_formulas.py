"""Drafts of each published format against a plain implementation of the formulas, without caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from model.logprobs import TOP
from tests.compile.tiny import write_model
from tests.model.drafted import Drafted, graphs_of, steps
from tests.model.heads import BLOCK_FACTS, BLOCKS, MASK, write_block, write_head

# variants of an EAGLE-3 head: keyword arguments of `write_head`
HEADS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "normed after": {"adds_normed": False},
    "original": {"original": True},
    "all ids": {"draft_vocab": 64},
}
# drafter -> sets of k to build; steps use the first k of a set
KS = {"parallel": ((1,), (2,), (5,), (3, 7), (16,)), "eagle3": ((1,), (4,)), "dflash": ((1,), (5,))}
DRAFTS = ["parallel", *(f"eagle3 {name}" for name in HEADS), *(f"dflash {form}" for form in BLOCKS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of eight layers and a draft of each format."""
    folder = tmp_path_factory.mktemp("drafts")
    target = write_model(folder / "target", 1, scale=0.4, num_hidden_layers=8)
    write_model(folder / "parallel", 2, scale=0.4, num_hidden_layers=2, pard_token=MASK)
    for name, flags in HEADS.items():
        write_head(folder / f"eagle3 {name}", target, **flags)
    for form in BLOCKS:
        write_block(folder / f"dflash {form}", target, form)
    return folder


def _steps(folder: Path, draft: str, ks: tuple[int, ...], count: int, **more: Any) -> Iterator[list[Drafted]]:
    return steps(graphs_of(folder / "target", folder / draft, tuple(sorted(ks))), ks[0], count, **more)


class Plain:
    """Decoder layers from the formulas: no cache, RoPE as multiplication of complex numbers."""

    def __init__(self, folder: Path, draft: str) -> None:
        self.raw = json.loads((folder / draft / "config.json").read_text())
        self.config = self.raw.get("transformer_layer_config", self.raw)
        of_target = load_file(folder / "target/model.safetensors")
        self.w = {name: of_target[f"{prefix}{name}"] for prefix, name in (("model.", "embed_tokens.weight"),
                                                                         ("", "lm_head.weight"))}  # fmt: skip
        weights = load_file(folder / draft / "model.safetensors")
        self.w |= {name.replace("midlayer", "layers.0"): tensor for name, tensor in weights.items()}
        self.embed = self.w["embed_tokens.weight"]

    def product(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, x_HSD: Tensor, position_S: Tensor) -> Tensor:
        half = self.config["head_dim"] // 2
        angles = torch.outer(position_S, self.config["rope_theta"] ** (-torch.arange(half) / half))
        rotated = torch.complex(x_HSD[..., :half], x_HSD[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((rotated.real, rotated.imag), -1)

    def attention(self, at: str, h_NE: Tensor, context_SE: Tensor, seen: Tensor) -> Tensor:
        """Attention of rows `h` over the context and `h`; `h` follows the context."""
        both = torch.cat((context_SE, h_NE))
        q, k, v = (
            self.product(f"{at}.{name}_proj", x).unflatten(-1, (-1, self.config["head_dim"])).transpose(0, 1)
            for name, x in (("q", h_NE), ("k", both), ("v", both))
        )
        if f"{at}.q_norm.weight" in self.w:
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        position_X = torch.arange(len(both))
        q, k = self.rotated(q, position_X[len(context_SE) :]), self.rotated(k, position_X)
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.product(f"{at}.o_proj", o.transpose(0, 1).flatten(1))

    def with_mlp(self, layer: str, x: Tensor) -> Tensor:
        y = self.norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (self.product(f"{layer}.mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + self.product(f"{layer}.mlp.down_proj", F.silu(gate) * up)


class Head(Plain):
    """An EAGLE-3 head over all rows: prompt, accepted ids and drafts."""

    def __init__(self, folder: Path, draft: str) -> None:
        super().__init__(folder, draft)
        self.adds_normed = self.raw.get("norm_before_residual", "speculators_model_type" in self.raw)
        self.taps = self.raw.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
        offsets_D = self.w.get("d2t", torch.zeros(64, dtype=torch.long))
        self.ids_D = offsets_D + torch.arange(len(offsets_D))

    def rows(self, next_S: Tensor, x_SE: Tensor) -> Tensor:
        """(S, E) the layer's outputs."""
        normed, count = self.norm("layers.0.hidden_norm", x_SE), len(x_SE)
        joined = torch.cat((self.norm("layers.0.input_layernorm", self.embed[next_S]), normed), -1)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        attn = self.attention("layers.0.self_attn", joined, joined[:0], causal)
        return self.with_mlp("layers.0", attn + (normed if self.adds_normed else x_SE))

    def __call__(self, known: list[int], drafts: list[int], states: list[Tensor]) -> tuple[Tensor, list[int]]:
        ids = torch.tensor(known + drafts)
        x_SE, actual = self.product("fc", torch.cat([states[tap] for tap in self.taps], -1)), []
        for _ in drafts:
            last = self.rows(ids[1 : len(x_SE) + 1], x_SE)[-1:]
            actual.append(self.product("lm_head", self.norm("norm", last)))
            x_SE = torch.cat((x_SE, last))
        return torch.cat(actual), self.ids_D[torch.cat(actual).argmax(-1)].tolist()


class Block(Plain):
    """A DFlash draft over context and block."""

    def __init__(self, folder: Path, draft: str) -> None:
        super().__init__(folder, draft)
        self.taps, self.shifted, self.causal = BLOCK_FACTS[draft.removeprefix("dflash ")]

    def __call__(self, known: list[int], drafts: list[int], states: list[Tensor]) -> tuple[Tensor, list[int]]:
        p, rows = len(known) - 1, len(drafts) + (not self.shifted)
        context = self.norm("hidden_norm", self.product("fc", torch.cat([states[t] for t in self.taps], -1)))
        x_NE, seen = self.embed[torch.tensor([known[-1]] + [MASK] * (rows - 1))], torch.ones(rows, p + rows).bool()
        if self.causal:
            seen = torch.arange(p + rows) <= torch.arange(p, p + rows)[:, None]
        for n in range(self.config["num_hidden_layers"]):
            h = self.norm(f"layers.{n}.input_layernorm", x_NE)
            x_NE = self.with_mlp(f"layers.{n}", x_NE + self.attention(f"layers.{n}.self_attn", h, context, seen))
        logits_kV = self.product("lm_head", self.norm("norm", x_NE)[rows - len(drafts) :])
        return logits_kV, self.decoded(known[-1], logits_kV)

    def decoded(self, token: int, logits_kV: Tensor) -> list[int]:
        """Greedy drafts after the input id; with a Markov head, drafts after the first are among the row's TOP best."""
        names, drafts = [f"markov_head.markov_{w}.weight" for w in ("w1", "w2")], [token]
        for logits_V in logits_kV:
            scores_V = logits_V
            if names[0] in self.w:
                bias_V = self.w[names[1]] @ self.w[names[0]][drafts[-1]]
                best_C = logits_V.topk(TOP).indices if len(drafts) > 1 else torch.arange(len(logits_V))
                scores_V = torch.full_like(logits_V, float("-inf"))
                scores_V[best_C] = (logits_V + bias_V)[best_C]
            drafts.append(int(scores_V.argmax()))
        return drafts[1:]


class Masked:
    """PARD's published inference: all ids and k - 1 masks in a causal forward pass; drafts are its last k rows."""

    def __init__(self, folder: Path, draft: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder / draft, dtype=torch.float32)

    def __call__(self, known: list[int], drafts: list[int], states: list[Tensor]) -> tuple[Tensor, list[int]]:
        k = len(drafts)
        logits_kV = self.model(torch.tensor([known + [MASK] * (k - 1)])).logits[0, -k:]
        return logits_kV, logits_kV.argmax(-1).tolist()


FORMULAS: dict[str, Any] = {"parallel": Masked, "eagle3": Head, "dflash": Block}


@pytest.mark.parametrize(
    ("draft", "k_0"), [*((draft, False) for draft in DRAFTS), *((f"dflash {form}", True) for form in BLOCKS)]
)
@torch.no_grad()
def test_drafts_are_those_of_the_formulas(folder: Path, draft: str, k_0: bool) -> None:
    """After a prompt, after steps that accept a random number of drafts, and after steps of k = 0."""
    drafter, *_ = draft.split()
    plain = FORMULAS[drafter](folder, draft)
    hf = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    for ks in KS[drafter]:
        for n, step in enumerate(_steps(folder, draft, ks, 3, k_0=k_0)):
            for drafted in step:
                states = hf(torch.tensor([drafted.known[:-1]]), output_hidden_states=True).hidden_states
                logits, drafts = plain(drafted.known, drafted.drafts, [state[0] for state in states])
                assert torch.allclose(drafted.logits, logits, atol=1e-4, rtol=0), n
                assert drafted.drafts == drafts


# offset to the input id's position from which keys and values are never read; a parallel draft rewrites K ids
@pytest.mark.parametrize(
    ("draft", "unread"), [("parallel", -4), ("eagle3 speculators", 0), ("dflash z-lab", 0), ("dflash deepspec", 0)]
)
def test_no_row_sees_what_was_not_accepted(folder: Path, draft: str, unread: int) -> None:
    """Overwritten rows from that offset on change nothing; one row earlier changes the drafts (negative control)."""
    clean = list(_steps(folder, draft, (4,), 4))
    for spoiled, same in ((unread, True), (unread - 1, False)):
        steps_of = zip(clean, _steps(folder, draft, (4,), 4, spoiled=spoiled), strict=True)
        pairs = [pair for both in steps_of for pair in zip(*both, strict=True)]
        assert all(torch.equal(a.logits, b.logits) and a.known == b.known for a, b in pairs) is same


@pytest.mark.parametrize(("draft", "same"), [("dflash z-lab", False), ("dflash causal", True)])
def test_a_block_of_fewer_rows_is_a_different_drafter_unless_it_is_causal(folder: Path, draft: str, same: bool) -> None:
    few, many = (next(_steps(folder, draft, (k,), 1)) for k in (2, 5))
    assert all(torch.allclose(a.logits, b.logits[:2], atol=1e-5) for a, b in zip(few, many, strict=True)) is same
