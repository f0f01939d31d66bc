"""Medusa heads against plain code and the demo's own, on one rank and several, and the state that they read.

tests/serve/test_medusa.py holds them against vLLM's module, in vLLM's environment.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from demo.drafter import target_pass
from demo.medusa import load_heads
from demo.models import load
from model.backing import REFERENCE, Backing
from model.bundle.checkpoint import Checkpoint
from model.config import load_config
from model.drafters.medusa import KIND, Medusa, MedusaHeads
from model.drafters.registry import load_draft
from model.nki import simulated
from model.nki.backing import backing_of
from model.ops import EAGER
from model.packing import Packing
from model.parallel import ONE_RANK, Parallel
from model.speculative import Pair
from tests.compile.tiny import shard_of, write_medusa
from tests.model.drafted import PROMPTS, loaded, steps
from tests.model.ranks import RankOps, on_ranks

DEMO = Path("demo")
NKI = backing_of("nki", simulated.serve)


def heads_of(
    folder: Path, parallel: Parallel = ONE_RANK, rank: int = 0, backing: Backing = REFERENCE, target: str = ""
) -> MedusaHeads:
    """The heads of a checkpoint on one rank, in fp32."""
    config = load_draft(KIND, str(folder), load_config(target or "Qwen/Qwen3-0.6B"))
    heads = MedusaHeads(config, parallel, backing)
    heads.load_state_dict(shard_of(Checkpoint(folder, config), rank, parallel.tp, torch.float32, Packing()))
    return heads.eval()


def plain_logits(folder: Path, states_BE: Tensor, heads: int, layers: int, shared: bool) -> Tensor:
    """(B, heads, V) by the paper's formula, one head after the other: an independent plain implementation."""
    weights, logits = load_file(folder / "model.safetensors"), []
    for head in range(heads):
        x_BE = states_BE
        for layer in range(layers):
            x_BE = x_BE + silu(x_BE @ weights[f"blocks.{head}.layers.{layer}.weight"].T)
        logits.append(x_BE @ weights[f"lm_heads.{0 if shared else head}.weight"].T)
    return torch.stack(logits, 1)


@pytest.fixture(scope="module", params=[True, False], ids=["shared projection", "a projection each"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    folder = tmp_path_factory.mktemp("medusa") / "heads"
    return write_medusa(folder, 3, heads=5, layers=2, shared=request.param, scale=0.3), request.param


STATES = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_are_those_of_plain_code(checkpoint: tuple[Path, bool]) -> None:
    folder, shared = checkpoint
    expected = plain_logits(folder, STATES[:, 0], 5, 2, shared)
    for k in (1, 3, 5):
        torch.testing.assert_close(heads_of(folder).logits(STATES, k), expected[:, :k], atol=1e-4, rtol=0)
    assert expected.std(1).mean() > 0.5, "heads that are all alike would prove nothing"


@torch.no_grad()
@pytest.mark.parametrize("backing", [REFERENCE, NKI], ids=["reference", "nki"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_have_the_logits_of_one(checkpoint: tuple[Path, bool], tp: int, backing: Backing) -> None:
    """Every output is one rank's whole sum; a gather a layer, and one of the logits where they are gathered."""
    folder, _ = checkpoint
    alone = heads_of(folder).logits(STATES, 4)

    def work(ops: RankOps) -> tuple[Tensor, int]:
        return heads_of(folder, Parallel(tp, ops), ops.rank, backing).logits(STATES, 4), ops.gathered

    found = on_ranks(tp, work)
    logits = [logits for logits, _ in found]
    for of_rank in [torch.cat(logits, -1)] if backing.sharded else logits:
        torch.testing.assert_close(of_rank, alone, atol=1e-5, rtol=0)
    assert {gathered for _, gathered in found} == {2 + (not backing.sharded)}


@pytest.mark.parametrize("k", [1, 5, 16])
def test_drafts_of_a_step_are_those_of_the_demo_heads(k: int) -> None:
    """The committed heads, given the state that transformers has before each step's last id; steps keep any number."""
    theirs, (qwen3, _) = load_heads(DEMO / "draft_medusa"), load(DEMO / "target")
    target, heads = loaded(DEMO / "target"), heads_of(DEMO / "draft_medusa")
    pair = Pair(target, Medusa(heads, target.config.num_hidden_layers), EAGER)
    target.taps = pair.drafter.taps
    for n, step in enumerate(steps(pair, (torch.zeros(len(PROMPTS), 1, target.config.hidden_size),), k, 5)):
        for drafted in step:
            seen = target_pass(qwen3, torch.tensor([drafted.known]))
            anchor = len(drafted.known) - 1
            expected, one_before = (theirs.draft_logits(seen, torch.tensor([a]), k)[0] for a in (anchor, anchor + 1))
            torch.testing.assert_close(drafted.logits, expected, atol=1e-3, rtol=0, msg=f"step {n}")
            assert drafted.drafts == expected.argmax(-1).tolist()
            assert not torch.allclose(drafted.logits, one_before, atol=1e-1), "the state of a different row has a say"
