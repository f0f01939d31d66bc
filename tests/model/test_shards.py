"""Draws from vocabulary shards: each rank sees its own ids, all come to the tokens of the whole vocabulary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from model import sampling
from model.config import PRESETS
from model.drafters.chain import Chain
from model.filters import Filters
from model.kernels import Kernels
from model.nki import simulated
from model.nki.context import make_context
from model.nki.filter_floor import ALL_GATHERS, filter_floor, over_ranks
from model.nki.kernels import NkiKernels
from model.ops import EAGER
from model.parallel import Parallel, Shard
from model.qwen3 import Qwen3
from model.sampling import Draws, Sampling
from model.window import Window
from tests.model.ranks import RankOps, on_ranks
from tests.model.test_simulated_kernels import _filters

NKI = backing_of("nki", simulated.serve)
SIMULATED = NkiKernels(simulated.serve)


def shard(rank: int, width: int) -> Shard:
    return Shard(torch.tensor([[rank * width]], dtype=torch.int32), width)


def part(whole: Tensor, ops: RankOps, ranks: int) -> Tensor:
    return whole.chunk(ranks, -1)[ops.rank].contiguous()


def drawn(logits_RV: Tensor, params: Sampling, positions_R: Tensor, ranks: int, shift: int = 0) -> list[Draws]:
    """What every rank knows of the draws; with `shift`, from a first id that is as much too high."""

    def work(ops: RankOps) -> Draws:
        logits = part(logits_RV, ops, ranks)
        held = shard(ops.rank, logits.shape[1])
        held = held._replace(start=held.start + shift)
        prepared = SIMULATED.prepare(ops, params, positions_R[:, None], held)
        return SIMULATED.coupled_sample(ops, logits, prepared)

    return on_ranks(ranks, work)


def reference(logits_RV: Tensor, params: Sampling, positions_R: Tensor) -> Tensor:
    """The draws of the whole vocabulary."""
    return sampling.coupled_sample(EAGER, logits_RV, params.draw(positions_R[:, None]))


def rows(count: int, vocabulary: int) -> tuple[Tensor, Sampling, Tensor]:
    """Greedy, drawn and filtered rows in turn, some of them with ties."""
    rng = np.random.default_rng(count)
    logits = np.round(4 * rng.standard_normal((count, vocabulary))).astype(np.float32) / 2
    params = _filters(count, 1)
    seeds = torch.from_numpy(rng.integers(-(2**31), 2**31, (count, 2)).astype(np.int32))
    greedy = torch.arange(count) % 3 == 0
    params = params._replace(temperature_B=torch.where(greedy, 0.0, params.temperature_B), seed_B2=seeds)
    return torch.from_numpy(logits), params, torch.arange(5, 5 + count, dtype=torch.int32)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_merged_draws_are_those_of_the_whole_vocabulary(ranks: int) -> None:
    case = rows(12, 8 * 23)
    expected = reference(*case)
    found = drawn(*case, ranks)
    assert all(torch.equal(d.merged(), expected) for d in found)
    assert {tuple(d.ids.shape) for d in found} == {(ranks, 12)}
    assert not torch.equal(drawn(*case, ranks, shift=2)[0].merged(), expected), "the first id has a say"


def test_more_rows_than_a_launch_takes() -> None:
    case = rows(130, 64)
    assert torch.equal(drawn(*case, 2)[1].merged(), reference(*case))


def test_equal_scores_go_to_the_smallest_id() -> None:
    logits = torch.zeros(2, 64)
    logits[0, [17, 33, 50]] = 1.0
    params = Sampling(torch.zeros(2), torch.zeros(2, 2).int(), Filters(torch.zeros(2), torch.ones(2), torch.zeros(2)))
    for ranks in (2, 4):
        assert drawn(logits, params, torch.zeros(2, dtype=torch.int32), ranks)[0].merged().tolist() == [17, 0]


@pytest.mark.parametrize("k", [0, 1, 5])
def test_acceptance_merges_the_shards(k: int) -> None:
    """The kernel and plain torch, over values with ties between shards."""
    generator = torch.Generator().manual_seed(k)
    values = torch.randint(0, 3, (4, 6, k + 1), generator=generator).float()
    ids = torch.randint(0, 16, (4, 6, k + 1), generator=generator).int() + 16 * torch.arange(4).int()[:, None, None]
    draws, limit = Draws(values, ids), torch.tensor([k, k, k, 2, 1, 0], dtype=torch.int32)
    drafts = draws.merged()[:, :k].clone()
    drafts[1::2, k // 2 :] += 1
    found = SIMULATED.accept(EAGER, drafts, draws, limit)
    for ours, theirs in zip(found, Kernels().accept(EAGER, drafts, draws, limit), strict=True):
        assert torch.equal(ours, theirs)
    highest = values.argmax(0, keepdim=True)
    assert torch.equal(draws.merged(), ids.gather(0, highest)[0]), "argmax takes the first shard, ids ascend"


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_finds_the_same_floor(ranks: int) -> None:
    """That of one rank, by as many collectives as the plan says; masses round differently, no near-tie is here."""
    logits, params, positions = rows(9, 4 * 31)
    draw = params.draw(positions[:, None])
    by = (draw.heat_R, draw.filters)

    def work(ops: RankOps) -> tuple[Tensor, int]:
        return filter_floor(ops, part(logits, ops, ranks), by, SIMULATED._weights_above), ops.gathered

    found = on_ranks(ranks, work)
    alone = filter_floor(EAGER, logits, by, SIMULATED._weights_above)
    assert all(torch.equal(floor, alone) and gathered == ALL_GATHERS for floor, gathered in found)


def test_sums_of_ranks_have_one_order() -> None:
    """By halves, whatever the number of rows; another order gives other bits."""
    parts = torch.randn(4, 40, 3, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 6, 40)[:, None]
    found = on_ranks(4, lambda ops: over_ranks(ops, parts[ops.rank]))
    a, b, c, d = parts
    assert all(torch.equal(x, (a + c) + (b + d)) for x in found)
    assert not torch.equal(found[0], ((a + b) + c) + d)
    few = on_ranks(4, lambda ops: over_ranks(ops, parts[ops.rank, 7:9]))
    assert torch.equal(few[0], found[0][7:9])


CONFIG = dataclasses.replace(
    PRESETS["Qwen/Qwen3-0.6B"],
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    vocab_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
)


_DRAFTS = {"group": Parallel(1), "all": Parallel(2), "head on all": Parallel(1, wider=Parallel(2))}


@pytest.mark.parametrize("of_draft", _DRAFTS.values(), ids=_DRAFTS)
def test_noise_is_shared_by_models_of_the_same_shards(of_draft: Parallel) -> None:
    """A draft alone in its group has the target's ids if its head is split as the target's."""
    target, draft = (Qwen3(CONFIG, parallel, NKI) for parallel in (Parallel(2), of_draft))
    head_tp = of_draft.of_head.tp
    target.rank_util.rank.data += 1
    draft.rank_util.rank.data += head_tp - 1
    off = torch.zeros(3)
    params = Sampling(off + 1, torch.arange(6, dtype=torch.int32).view(3, 2), Filters(off, off + 1, off))
    window = Window.of(1, torch.arange(3, dtype=torch.int32)[:, None], 128)
    of_target = target.kernels.prepare(EAGER, params, window.drawn_BN, target.shard)
    drafts = Chain(draft).draw(EAGER, params, window, of_target, target.shard)
    assert of_target.noise_RV is not None
    assert drafts.noise_RV is not None
    assert (of_target.start_11.item(), drafts.start_11.item()) == (48, 48 * (head_tp - 1))  # type: ignore[union-attr]
    assert torch.equal(of_target.noise_RV, drafts.noise_RV[..., -48:])
    assert (of_target.noise_RV is drafts.noise_RV) == (head_tp == 2)
