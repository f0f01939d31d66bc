"""EAGLE-3 heads against plain implementations, what they may not see, and where their weights come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from model.approx_filters import approximate
from model.cache import AttentionMetadata
from model.config import load_config
from model.context import ONE_RANK, Context
from model.drafters.eagle3 import Eagle3, Eagle3Model
from model.drafters.registry import load_draft
from model.errors import UserError
from model.filters import Filters
from model.nki import simulated
from model.nki.context import NkiContext
from model.ops import EAGER
from model.sampling import SamplingParams
from model.weights import Packing
from tests.compile.tiny import shard_of, write_model
from tests.model.drafted import PROMPTS, Drafted, Spoil, beyond, pair_of, steps
from tests.model.heads import write_head
from tests.model.paged import empty_caches
from tests.model.ranks import on_ranks
from trnspec.bundle.checkpoint import Checkpoint

# what a head of either format may say, and how its folder is written
HEADS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "normed-after": {"adds_normed": False},
    "original": {"original": True},
    "all-ids": {"draft_vocab": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of eight layers and a head of each kind."""
    folder = tmp_path_factory.mktemp("eagle3")
    write_model(folder / "target", 1, scale=0.4, num_hidden_layers=8)
    for name, flags in HEADS.items():
        write_head(folder / name, folder / "target", **flags)
    return folder


def _steps(target: Path, head: Path, k: int, count: int, spoil: Spoil = lambda c, p: c) -> Iterator[list[Drafted]]:
    pair = pair_of(target, head)
    assert pair.draft_model is not None
    return steps(pair, (torch.zeros(len(PROMPTS), 1, pair.draft_model.config.hidden_size),), k, count, spoil)


class Plain:
    """A head as its paper has it: no cache, every row computed anew, positions turned as complex numbers."""

    def __init__(self, head: Path, target: Path) -> None:
        raw = json.loads((head / "config.json").read_text())
        self.layer, self.w = raw.get("transformer_layer_config", raw), load_file(head / "model.safetensors")
        self.w = {name.replace("midlayer", "layers.0"): tensor for name, tensor in self.w.items()}
        of_target = load_file(target / "model.safetensors")
        self.embed = self.w.get("embed_tokens.weight", of_target["model.embed_tokens.weight"])
        self.adds_normed = raw.get("norm_before_residual", "speculators_model_type" in raw)
        self.taps = raw.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
        offsets_D = self.w.get("d2t", torch.zeros(64, dtype=torch.long))
        self.ids_D = offsets_D + torch.arange(len(offsets_D))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, x_HSD: Tensor) -> Tensor:
        half = self.layer["head_dim"] // 2
        angles = torch.outer(torch.arange(x_HSD.shape[1]), self.layer["rope_theta"] ** (-torch.arange(half) / half))
        rotated = torch.complex(x_HSD[..., :half], x_HSD[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((rotated.real, rotated.imag), -1)

    def rows(self, next_S: Tensor, x_SE: Tensor) -> Tensor:
        """(S, E) the layer's output at all rows."""
        at, dim = "layers.0", self.layer["head_dim"]
        normed = self.norm(f"{at}.hidden_norm", x_SE)
        joined = torch.cat((self.norm(f"{at}.input_layernorm", self.embed[next_S]), normed), -1)
        q, k, v = (
            (joined @ self.w[f"{at}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)
            for name in "qkv"
        )
        group = q.shape[0] // k.shape[0]
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        o = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = o.transpose(0, 1).flatten(1) @ self.w[f"{at}.self_attn.o_proj.weight"].T
        x = x + (normed if self.adds_normed else x_SE)
        y = self.norm(f"{at}.post_attention_layernorm", x)
        gate, up = (y @ self.w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T

    def logits(self, known: list[int], drafts: list[int], states: list[Tensor]) -> Tensor:
        """(k, D) after the known ids, of which the last one's states are not known, and after each draft."""
        ids = torch.tensor(known + drafts)
        x_SE, found = torch.cat([states[tap] for tap in self.taps], -1) @ self.w["fc.weight"].T, []
        for _ in drafts:
            last = self.rows(ids[1 : len(x_SE) + 1], x_SE)[-1:]
            found.append(self.norm("norm", last) @ self.w["lm_head.weight"].T)
            x_SE = torch.cat((x_SE, last))
        return torch.cat(found)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_drafts_are_those_of_a_plain_head(folder: Path, head: str) -> None:
    """Of the prompt's rows, of those kept and of those chained; drafts are the target's ids of the best logits."""
    target, plain = folder / "target", Plain(folder / head, folder / "target")
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for k in (1, 4):
        for n, step in enumerate(_steps(target, folder / head, k, 3)):
            for drafted in step:
                states = theirs(torch.tensor([drafted.known[:-1]]), output_hidden_states=True).hidden_states
                expected = plain.logits(drafted.known, drafted.drafts, [state[0] for state in states])
                assert torch.allclose(drafted.logits, expected, atol=1e-4, rtol=0), n
                assert drafted.drafts == plain.ids_D[expected.argmax(-1)].tolist()


def test_no_row_sees_what_was_not_accepted(folder: Path) -> None:
    """From the input id's position on, whatever was in the cache is ignored; one place before it matters."""
    clean = list(_steps(folder / "target", folder / "speculators", 4, 4))
    for distance, same in ((0, True), (-1, False)):
        spoiled = list(_steps(folder / "target", folder / "speculators", 4, 4, beyond(distance)))
        pairs = [(a, b) for x, y in zip(clean, spoiled, strict=True) for a, b in zip(x, y, strict=True)]
        assert all(torch.equal(a.logits, b.logits) and a.known == b.known for a, b in pairs) is same


def test_a_head_without_embeddings_needs_its_target(folder: Path) -> None:
    target = load_config(str(folder / "target"))
    with pytest.raises(UserError, match=r"lacks embed_tokens\.weight"):
        Checkpoint(folder / "original", load_draft(Eagle3, str(folder / "original"), target))


def test_a_head_with_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    """A layer that norms queries and keys, as vLLM's Qwen3 heads do, has weights that nothing here reads."""
    config = load_draft(Eagle3, str(folder / "speculators"), load_config(str(folder / "target")))
    tensors = load_file(folder / "speculators/model.safetensors")
    save_file(tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has unknown layers\.0\.self_attn\.q_norm\.weight"):
        Checkpoint(tmp_path, config, Checkpoint(folder / "target", load_config(str(folder / "target"))))


@torch.no_grad()
def test_ranks_sample_what_one_does(folder: Path) -> None:
    """Two ranks hold half of the draft's ids each: simulated kernels, greedy and sampled, filtered and not."""
    target, path = load_config(str(folder / "target")), folder / "speculators"
    config = load_draft(Eagle3, str(path), target)
    checkpoint = Checkpoint(path, config, Checkpoint(folder / "target", target))
    x_B1E = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(5))
    states_B1F = torch.randn(6, 1, 96, generator=torch.Generator().manual_seed(6))
    temperature, seeds = torch.tensor([0.0, 0.7, 1.3, 0.0, 0.9, 2.0]), torch.arange(12, dtype=torch.int32).view(6, 2)
    top_k, top_p = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 9.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.8, 0.9])
    params = approximate(SamplingParams(temperature, seeds, Filters(top_k, top_p, torch.zeros(6))))

    def work(ctx: Context, rank: int) -> tuple[Tensor, Tensor]:
        draft = Eagle3Model(config, ctx)
        draft.load_state_dict(shard_of(checkpoint, rank, ctx.tp, torch.float32, Packing()))
        noise = draft.noise(seeds, torch.full((6, 1), 40, dtype=torch.int32))
        return draft.draft(x_B1E, params, noise), draft.feature(states_B1F)

    ids_B1, feature = work(ONE_RANK, 0)
    assert len(set(ids_B1.flatten().tolist())) > 3
    for of_rank in on_ranks(2, lambda ops: work(NkiContext(2, ops, simulated.serve), ops.rank)):
        assert torch.equal(of_rank[0], ids_B1)
        assert torch.allclose(of_rank[1], feature, atol=1e-6)


@torch.no_grad()
def test_kernels_serve_the_layer(tmp_path: Path) -> None:
    """Several rows, then one: attention of plain projections, and an MLP that is one launch on packed weights."""
    target = write_model(tmp_path / "target", 1, num_hidden_layers=8, hidden_size=128)
    head = write_head(tmp_path / "head", target, hidden_size=128)
    of_target = load_config(str(target))
    config = load_draft(Eagle3, str(head), of_target)
    states = torch.randn(2, 3, 3 * 128, generator=torch.Generator().manual_seed(7))
    ids, table = torch.tensor([[3, 60, 9], [5, 5, 1]], dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
    meta, outputs = AttentionMetadata(torch.tensor([[0, 1, 2], [90, 91, 92]], dtype=torch.int32), table), []
    for ctx in (ONE_RANK, NkiContext(1, EAGER, simulated.serve)):
        draft, packing = ctx.fuse(Eagle3Model(config, ctx)), ctx.packing(config)._replace(attention={})
        checkpoint = Checkpoint(head, config, Checkpoint(target, of_target))
        draft.load_state_dict(shard_of(checkpoint, 0, 1, torch.float32, packing))
        assert ("layers.0.mlp.gate_up_packed" in draft.state_dict()) == ctx.sharded
        x_B3E, caches = draft.hidden(ids, draft.feature(states), empty_caches(config, 1, 3, torch.float32), meta)
        after = meta._replace(positions_BN=meta.positions_BN[:, 2:] + 1)
        x_B1E, _ = draft.hidden(ids[:, :1], x_B3E[:, 2:], caches, after)
        outputs.append(draft.lm_head(draft.norm(torch.cat((x_B3E, x_B1E), 1))))
    assert torch.allclose(*outputs, atol=1e-4, rtol=0)
