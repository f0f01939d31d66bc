"""Vocabulary shards on simulated kernels: cutoffs, samples and log-probabilities equal those of the full vocabulary.

test_samples.py compares the samples of several ranks with an oracle.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import PRESETS
from model.context import ONE_RANK, Context
from model.filters import Filters
from model.layers import LanguageModel, mask_padding
from model.logits_processors import LogitsProcessors
from model.logprobs import TOP
from model.logprobs import logprobs as logprobs_of
from model.nki import simulated
from model.nki.context import NkiContext
from model.nki.filter_floor import filter_floor, sum_over_ranks
from model.ops import EAGER
from model.sampling import SamplingParams
from tests.model.ranks import RankOps, on_ranks
from tests.model.test_logits_processors import some, words

NKI = NkiContext(1, EAGER, simulated.serve)
RANK_0 = torch.zeros((1, 1), dtype=torch.int32)


def filters_of(rows: int, seed: int) -> tuple[Tensor, Filters]:
    """Temperatures and filters of rows."""
    rng = np.random.default_rng(seed)
    columns = (
        rng.choice([0.5, 1.0, 1.7], rows), rng.choice([0, 1, 3, 17, 400], rows),
        rng.choice([1.0, 0.9, 0.3, 0.01], rows), rng.choice([0.0, 0.0, 0.05, 1.0], rows),
    )  # fmt: skip
    temperature_R, *filters = (torch.tensor(c, dtype=torch.float32) for c in columns)
    return temperature_R, Filters(*filters)


def cases(count: int, vocabulary: int) -> tuple[Tensor, SamplingParams]:
    """Logits and parameters of greedy, sampled and filtered rows in turn, some of them with ties."""
    rng = np.random.default_rng(count)
    logits = np.round(4 * rng.standard_normal((count, vocabulary))).astype(np.float32) / 2
    temperature_R, filters = filters_of(count, 1)
    seeds = torch.from_numpy(rng.integers(-(2**31), 2**31, (count, 2)).astype(np.int32))
    params = SamplingParams(torch.where(torch.arange(count) % 3 == 0, 0.0, temperature_R), seeds, filters)
    return torch.from_numpy(logits), params


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_finds_the_same_floor(ranks: int) -> None:
    """The cutoff of one rank, with 18 collectives: the best logits, 8 passes twice, and the mass. Masses may round
    differently; no row is numerically tied."""
    logits, params = cases(9, 4 * 31)
    by = (params.divisor_R, params.filters)

    def work(ops: RankOps) -> tuple[Tensor, int]:
        shard = logits.chunk(ranks, -1)[ops.rank].contiguous()
        return filter_floor(ops, ops.rank_11, shard, by, NKI._weights_above), ops.collectives

    expected = filter_floor(EAGER, RANK_0, logits, by, NKI._weights_above)
    assert all(torch.equal(floor, expected) and count == 18 for floor, count in on_ranks(ranks, work))


def test_sums_of_ranks_have_one_order() -> None:
    """By halves, for any number of rows; another order gives other bits (negative control)."""
    parts = torch.randn(4, 40, 3, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 6, 40)[:, None]
    actual = on_ranks(4, lambda ops: sum_over_ranks(ops.gather, parts[ops.rank]))
    a, b, c, d = parts
    assert all(torch.equal(x, (a + c) + (b + d)) for x in actual)
    assert not torch.equal(actual[0], ((a + b) + c) + d)
    few = on_ranks(4, lambda ops: sum_over_ranks(ops.gather, parts[ops.rank, 7:9]))
    assert torch.equal(few[0], actual[0][7:9])


@pytest.mark.parametrize(("ranks", "ids"), [(1, 184), (4, 184), (4, 183), (16, 165)])
def test_shards_sample_and_score_as_the_full_vocabulary_does(ranks: int, ids: int) -> None:
    """Greedy, sampled and filtered rows, each with a mask of allowed ids.

    4 ranks pad 183 ids by a column, 16 ranks pad 165 ids by 11, all of the last rank's.
    """
    logits_RV, params = cases(12, ids)
    config = replace(PRESETS["Qwen/Qwen3-0.6B"], vocab_size=ids)
    (rows, count), none = logits_RV.shape, torch.full((12, 1), -1).int()
    allowed = [some(count, seed, 0.2) for seed in range(11)] + [[i == 150 for i in range(count)]]
    masks_RW = torch.from_numpy(np.stack([words(a) for a in allowed]))
    penalties = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(rows, 1)
    positions_R = torch.arange(5, 5 + rows, dtype=torch.int32)

    def of_rank(ctx: Context, rank: int) -> tuple[Tensor, Tensor]:
        """Samples under masks, and log-probabilities among the allowed ids."""
        model = LanguageModel(config, ctx)
        model.rank.fill_(rank)
        shard = model.shard
        padded_RV = torch.nn.functional.pad(logits_RV, (0, -ids % ctx.tp), value=1e9)
        logits_R1V = padded_RV.chunk(ctx.tp, -1)[rank][:, None].contiguous()
        logits_R1V = mask_padding(logits_R1V, shard.rank_11, ids, ctx.tp)
        counts = torch.zeros((rows, 1, shard.width), dtype=torch.int32)
        processors = LogitsProcessors.of(masks_RW[:, None], penalties, (none, none.float()), counts, shard)
        noise_RV = ctx.gumbel_noise(params.seed_R2, positions_R, shard)
        ids_R = ctx.sample(processors.process(logits_R1V)[:, 0], params, noise_RV, shard).token_ids()
        return ids_R, logprobs_of(ctx, processors.visible(logits_R1V)[:, 0], ids_R, shard)

    expected, _ = of_rank(ONE_RANK, 0)
    logprobs = torch.where(torch.tensor(allowed), logits_RV, float("-inf")).log_softmax(-1)
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    real = best.values[:, :TOP].isfinite()
    for ids_R, scores in on_ranks(ranks, lambda ops: of_rank(NkiContext(ranks, ops, simulated.serve), ops.rank)):
        assert torch.equal(ids_R, expected)
        assert all(a[i] for a, i in zip(allowed, ids_R.tolist(), strict=True))
        sampled = logprobs.gather(1, ids_R.long()[:, None])
        torch.testing.assert_close(scores[:, 0], sampled[:, 0], atol=2e-6, rtol=0)
        assert scores[:, 1].tolist() == (logprobs >= sampled).sum(-1).tolist()
        assert torch.equal(scores[:, 2 + TOP :][real].long(), best.indices[:, :TOP][real])
        torch.testing.assert_close(scores[:, 2 : 2 + TOP][real], best.values[:, :TOP][real], atol=2e-6, rtol=0)
        assert (scores[:, 2 : 2 + TOP][~real] < -1e20).all()
