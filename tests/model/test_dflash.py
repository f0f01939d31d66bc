"""DFlash against a plain restatement of its formulas; what its rows may not see; its formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from model.approx_filters import approximate
from model.config import load_config
from model.context import ONE_RANK, Context
from model.drafters.dflash import DFlash, DFlashConfig, DFlashModel
from model.drafters.registry import infer_drafter, load_draft
from model.errors import UserError
from model.filters import Filters
from model.logprobs import TOP
from model.nki import simulated
from model.nki.context import NkiContext
from model.ops import EAGER, iota
from model.sampling import SamplingParams, gumbel_noise
from tests.compile.tiny import write_model
from tests.model.drafted import Drafted, beyond, pair_of, steps
from tests.model.heads import BLOCKS, write_block
from tests.model.ranks import on_ranks

MASK, TARGET = 61, "target"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of eight layers and a draft of each format."""
    folder = tmp_path_factory.mktemp("dflash")
    write_model(folder / TARGET, 1, scale=0.4, num_hidden_layers=8)
    for form in BLOCKS:
        write_block(folder / form, folder / TARGET, form)
    return folder


def _steps(folder: Path, form: str, k: int, count: int, **more: Any) -> Iterator[list[Drafted]]:
    return steps(pair_of(folder / TARGET, folder / form), (), k, count, **more)


def _config(folder: Path, form: str) -> DFlashConfig:
    config: DFlashConfig = load_draft(DFlash, str(folder / form), load_config(str(folder / TARGET)))
    return config


# of each format: taps, whether a row is the draft of the position after its own, whether the block is causal
FACTS = {
    "z-lab": ([1, 3, 5], False, False),
    "causal": ([1, 3, 5], False, True),
    "unnamed layers": ([2, 6], False, False),
    "specforge": ([1, 3, 5], True, False),
    "deepspec": ([0, 4, 7], True, False),
    "speculators": ([1, 3, 8], False, False),
    "from anchor": ([1, 3, 8], True, False),
}


class Plain:
    """The draft by its formulas: no cache, context and block side by side, positions rotated as complex numbers."""

    def __init__(self, folder: Path, form: str) -> None:
        raw = json.loads((folder / form / "config.json").read_text())
        self.layers = raw.get("transformer_layer_config", raw)
        self.w, of_target = (
            load_file(folder / form / "model.safetensors"),
            load_file(folder / TARGET / "model.safetensors"),
        )
        self.embed, self.head = of_target["model.embed_tokens.weight"], of_target["lm_head.weight"]
        self.taps, self.shifted, self.causal = FACTS[form]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.layers["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, x_SHD: Tensor, position_S: Tensor) -> Tensor:
        half = self.layers["head_dim"] // 2
        angles = torch.outer(position_S, self.layers["rope_theta"] ** (-torch.arange(half) / half))[:, None]
        rotated = torch.complex(x_SHD[..., :half], x_SHD[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((rotated.real, rotated.imag), -1)

    def logits(self, known: list[int], k: int, states: list[Tensor]) -> Tensor:
        """(k, V) after the known ids, of which the last one's states are not known."""
        p, rows = len(known) - 1, k + (not self.shifted)
        context = self.norm("hidden_norm", torch.cat([states[t] for t in self.taps], -1) @ self.w["fc.weight"].T)
        x_NE, position_X = self.embed[torch.tensor([known[-1]] + [MASK] * (rows - 1))], torch.arange(p + rows)
        seen = torch.ones(rows, p + rows, dtype=torch.bool)
        if self.causal:
            seen = position_X <= torch.arange(p, p + rows)[:, None]
        for n in range(self.layers["num_hidden_layers"]):
            at = f"layers.{n}."
            h = self.norm(f"{at}input_layernorm", x_NE)
            both = torch.cat((context, h))
            q, k_, v = (
                (x @ self.w[f"{at}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, self.layers["head_dim"]))
                for name, x in (("q", h), ("k", both), ("v", both))
            )
            q = self.rotated(self.norm(f"{at}self_attn.q_norm", q), position_X[p:])
            k_ = self.rotated(self.norm(f"{at}self_attn.k_norm", k_), position_X)
            group = q.shape[1] // k_.shape[1]
            q, k_, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, 0) for t in (k_, v))
            o = F.scaled_dot_product_attention(q, k_, v, attn_mask=seen)
            x_NE = x_NE + o.transpose(0, 1).flatten(1) @ self.w[f"{at}self_attn.o_proj.weight"].T
            y = self.norm(f"{at}post_attention_layernorm", x_NE)
            gate, up = (y @ self.w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x_NE = x_NE + (F.silu(gate) * up) @ self.w[f"{at}mlp.down_proj.weight"].T
        return self.norm("norm", x_NE)[rows - k :] @ self.head.T

    def drafts(self, token: int, logits_kV: Tensor) -> list[int]:
        """The greedy drafts after the input id; with a Markov head all but the first are of their row's best ids."""
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


@pytest.mark.parametrize("k_0", [False, True], ids=["", "between steps of k 0"])
@pytest.mark.parametrize("form", BLOCKS)
@torch.no_grad()
def test_drafts_are_those_of_the_formulas(folder: Path, form: str, k_0: bool) -> None:
    """After a prompt, after steps that accept any number of drafts, and after those of k 0."""
    plain, theirs = Plain(folder, form), AutoModelForCausalLM.from_pretrained(folder / TARGET, dtype=torch.float32)
    for k in (1, 5):
        for n, step in enumerate(_steps(folder, form, k, 3, k_0=k_0)):
            for drafted in step:
                states = theirs(torch.tensor([drafted.known[:-1]]), output_hidden_states=True).hidden_states
                expected = plain.logits(drafted.known, k, [state[0] for state in states])
                assert torch.allclose(drafted.logits, expected, atol=1e-4, rtol=0), n
                assert drafted.drafts == plain.drafts(drafted.known[-1], expected)


@pytest.mark.parametrize("form", ["z-lab", "deepspec"])
def test_no_row_sees_what_was_not_accepted(folder: Path, form: str) -> None:
    """From the input id's position on, whatever was in the cache is ignored; a stale row before it changes drafts."""
    clean = list(_steps(folder, form, 4, 4))
    for distance, same in ((0, True), (-1, False)):
        spoiled = list(_steps(folder, form, 4, 4, spoil=beyond(distance)))
        pairs = [(a, b) for x, y in zip(clean, spoiled, strict=True) for a, b in zip(x, y, strict=True)]
        assert all(torch.equal(a.logits, b.logits) and a.known == b.known for a, b in pairs) is same


@pytest.mark.parametrize(("form", "same"), [("z-lab", False), ("causal", True)])
def test_a_block_of_fewer_rows_is_a_different_drafter_unless_it_is_causal(folder: Path, form: str, same: bool) -> None:
    assert _config(folder, form).untrained_ks((2, 5)) == ([] if same else [2])
    few, many = (next(_steps(folder, form, k, 1)) for k in (2, 5))
    assert all(torch.allclose(a.logits, b.logits[:2], atol=1e-5) for a, b in zip(few, many, strict=True)) is same


PARAMS = SamplingParams(
    torch.tensor([0.0, 0.7, 1.3, 0.9]), torch.arange(8, dtype=torch.int32).view(4, 2),
    Filters(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.ones(4), torch.zeros(4)),
)  # fmt: skip


def _decoded(config: DFlashConfig, ctx: Context, rank: int, k: int = 4) -> Tensor:
    """Drafts of random rows after the ids 0, 1, 2, 3, on one of the ranks."""
    # ranks are threads, which share torch's own generator
    generator = torch.Generator().manual_seed(1)
    model = DFlashModel(config, ctx)
    model.rank.data[:] = rank
    for weight in (model.markov_w1, model.markov_w2):
        weight.data = torch.randn(weight.shape, generator=generator)
    logits_BkV = 2 * torch.randn(4, k, config.vocab_size, generator=generator)
    noise_BkV = model.noise(PARAMS.seed_R2, 40 + torch.arange(k, dtype=torch.int32).expand(4, -1))
    ids_B1 = torch.arange(4, dtype=torch.int32)[:, None]
    return model.markov_decode(ids_B1, logits_BkV.chunk(ctx.tp, -1)[rank], approximate(PARAMS), noise_BkV)


@pytest.mark.parametrize("vocabulary", [TOP, 64])
def test_a_markov_decoding_is_a_chain_of_samples(folder: Path, vocabulary: int) -> None:
    """Each sequence by its temperature, the last one of one id. Of more ids than candidates, these are the TOP that are
    best with their noise: chosen without it, a sampled draft would seldom be among them."""
    k, config = 4, replace(_config(folder, "deepspec"), vocab_size=vocabulary)
    found = _decoded(config, ONE_RANK, 0).tolist()
    torch.manual_seed(1)
    w1, w2 = torch.randn(vocabulary, 4), torch.randn(vocabulary, 4)
    logits_BkV = 2 * torch.randn(4, k, vocabulary)
    for b, (temperature, top_k) in enumerate(zip(PARAMS.temperature_R.tolist(), (0, 0, 0, 1), strict=True)):
        before = b
        for n in range(k):
            bias_V, logits_V = w2 @ w1[before], logits_BkV[b, n]
            position, ids_V = torch.tensor([40 + n]), iota(vocabulary, logits_V)
            noise_V = gumbel_noise(EAGER, PARAMS.seed_R2[b : b + 1], position, ids_V)[0] if temperature else 0 * bias_V
            base_V = logits_V + bias_V if n == 0 else logits_V
            best_C = (base_V / (temperature or 1) + noise_V).topk(TOP).indices
            scores_C = (logits_V + bias_V)[best_C] / (temperature or 1) + noise_V[best_C]
            if top_k:
                scores_C = (logits_V + bias_V)[best_C]
            before = int(best_C[scores_C.argmax()])
            assert found[b][n] == before, (b, n)


def test_ranks_decode_alike(folder: Path) -> None:
    """Two ranks have half of the logits each: candidates of both."""
    config = _config(folder, "deepspec")
    expected = _decoded(config, ONE_RANK, 0)
    assert len(set(expected.flatten().tolist())) > 8
    for of_rank in on_ranks(2, lambda ops: _decoded(config, NkiContext(2, ops, simulated.serve), ops.rank)):
        assert torch.equal(of_rank, expected)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("z-lab", {"block_size": 1}, "block_size is 1"),
    ("z-lab", {"layer_types": ["full_attention", "sliding_attention"]}, "sets layer_types"),
    ("z-lab", {"num_target_layers": 6}, "sets num_target_layers to 6"),
    ("z-lab", {"mask_token_id": 64}, "mask_token_id 64; the vocabulary ends at 63"),
    ("specforge", {"projector_type": "domino"}, "sets projector_type to 'domino'"),
    ("deepspec", {"markov_head_type": "gated"}, "sets markov_head_type to 'gated'"),
    ("speculators", {"draft_vocab_size": 40}, "sets draft_vocab_size to 40"),
    ("speculators", {"speculators_model_type": "dflash2"}, "describes 'dflash2'"),
    ("speculators", {"sample_from_anchor": "no"}, "shifted is 'no', expected true or false"),
    ("z-lab", {"selector_rank": 256}, "sets selector_rank to 256"),
    ("z-lab", {"attention_bias": True}, "sets attention_bias"),
]


@pytest.mark.parametrize(("form", "changes", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_built_is_refused_by_name(
    folder: Path, tmp_path: Path, form: str, changes: dict[str, Any], why: str
) -> None:
    raw = json.loads((folder / form / "config.json").read_text())
    nested = {*changes} & {"projector_type", "mask_token_id"} and "dflash_config" in raw
    (raw["dflash_config"] if nested else raw).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=why):
        load_draft(DFlash, str(tmp_path), load_config(str(folder / TARGET)))


@pytest.mark.parametrize("form", BLOCKS)
def test_every_format_is_inferred_and_read(folder: Path, form: str) -> None:
    config, target = _config(folder, form), load_config(str(folder / TARGET))
    assert infer_drafter(str(folder / form)) is DFlash
    assert (list(config.taps), config.shifted, config.causal) == FACTS[form]
    most = 5 + config.shifted
    assert config.incompatibility(target, most) == ""
    assert f"at most {most} ids in a block of 6" in config.incompatibility(target, most + 1)


def test_formats_of_one_draft_are_one_configuration(tmp_path: Path) -> None:
    """The demo's drafts, in SpecForge's and z-lab's formats, restated in DeepSpec's and in speculators'."""
    target = load_config("demo/target")
    for name, kind, forms in (("draft_dspark", "dspark", 2), ("draft_dflash", "dflash", 1)):
        raw = json.loads((Path("demo") / name / "config.json").read_text())
        expected, own = load_draft(DFlash, f"demo/{name}", target), raw.pop("dflash_config")
        taps = {"aux_hidden_state_layer_ids": [layer + 1 for layer in own.pop("target_layer_ids")]}
        speculators = {"speculators_model_type": kind, "transformer_layer_config": raw, "block_size": 16} | own | taps
        deepspec = raw | own | {"target_layer_ids": [tap - 1 for tap in expected.taps]}
        for form in (speculators, deepspec)[:forms]:
            (tmp_path / "config.json").write_text(json.dumps(form))
            assert load_draft(DFlash, str(tmp_path), target) == expected
