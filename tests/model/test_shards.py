"""Vocabulary shards on simulated kernels: cutoffs, samples and log-probabilities equal those of the full vocabulary.

test_samples.py compares the samples of several ranks with an oracle.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import PRESETS
from model.context import ONE_RANK, Context
from model.filters import Filters
from model.layers import LanguageModel, mask_padding
from model.logits_processors import PROMPT_FLAG, LogitsProcessors
from model.logprobs import TOP, logprobs
from model.nki import simulated
from model.nki.context import NkiContext
from model.nki.filter_floor import filter_floor, sum_over_ranks
from model.ops import EAGER
from tests.model.ranks import RankOps, on_ranks
from tests.model.test_logits_processors import some, words

NKI = NkiContext(1, EAGER, launch=simulated.serve)


def logits_of(rows: int, vocabulary: int) -> Tensor:
    """Random logits with ties."""
    rng = np.random.default_rng(rows)
    return torch.from_numpy(np.round(4 * rng.standard_normal((rows, vocabulary))).astype(np.float32) / 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_finds_the_same_floor(ranks: int) -> None:
    """The cutoff of one rank, with 18 collectives: the best logits, 8 passes twice, and the mass. Masses may round
    differently; no row is numerically tied."""
    rng, logits = np.random.default_rng(1), logits_of(9, 4 * 31)
    choices = [0.5, 1.0, 1.7], [0, 1, 3, 17, 400], [1.0, 0.9, 0.3, 0.01], [0.0, 0.0, 0.05, 1.0]
    temperature_R, *filters = (torch.tensor(rng.choice(values, 9), dtype=torch.float32) for values in choices)
    by = temperature_R, Filters(*filters)

    def work(ops: RankOps) -> tuple[Tensor, int]:
        shard = logits.chunk(ranks, -1)[ops.rank].contiguous()
        return filter_floor(ops, ops.rank_11, shard, by, NKI._weights_above), ops.collectives

    expected = filter_floor(EAGER, torch.zeros((1, 1), dtype=torch.int32), logits, by, NKI._weights_above)
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


def test_integers_are_gathered_exactly() -> None:
    """Counts with their flag; a collective sums floating-point numbers only."""
    x_1C = torch.tensor([[0, 7, -1, PROMPT_FLAG + 5, -(2**31), 65535]], dtype=torch.int32)
    for gathered in on_ranks(2, lambda ops: ops.gather(x_1C + ops.rank)):
        assert torch.equal(gathered, torch.cat((x_1C, x_1C + 1), 1))


@pytest.mark.parametrize(("ranks", "count"), [(1, 184), (4, 184), (4, 183), (16, 165)])
def test_shards_mask_and_score_as_the_full_vocabulary_does(ranks: int, count: int) -> None:
    """Masks of each row, and log-probabilities of one allowed id per row; a shard begins within a word of the mask.

    4 ranks pad 183 ids by a column, 16 ranks pad 165 ids by 11, all of the last rank's.
    """
    rows, config = 12, replace(PRESETS["Qwen/Qwen3-0.6B"], vocab_size=count)
    logits_RV, none = logits_of(rows, count), torch.full((rows, 1), -1).int()
    allowed = [some(count, seed, 0.2) for seed in range(rows - 1)] + [[i == 150 for i in range(count)]]
    masks_RW, penalties = torch.from_numpy(np.stack([words(a) for a in allowed])), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    ids_R = torch.tensor([max(range(count), key=lambda i, a=a: (a[i], 7 * i % count)) for a in allowed]).int()

    def of_rank(ctx: Context, rank: int) -> tuple[Tensor, Tensor]:
        """The masked logits of a rank, and the scores."""
        model = LanguageModel(config, ctx)
        model.rank.fill_(rank)
        shard, padded_RV = model.shard, torch.nn.functional.pad(logits_RV, (0, -count % ctx.tp), value=1e9)
        logits_R1V = padded_RV.chunk(ctx.tp, -1)[rank][:, None].contiguous()
        logits_R1V = mask_padding(logits_R1V, shard.rank_11, count, ctx.tp)
        assert shard.ids_V.max() < count
        counts, bias = torch.zeros((rows, 1, shard.width), dtype=torch.int32), (none, none.float())
        processors = LogitsProcessors.of(masks_RW[:, None], penalties.repeat(rows, 1), bias, counts, shard)
        visible_RV = processors.visible(logits_R1V)[:, 0]
        return processors.process(logits_R1V)[:, 0], logprobs(ctx, visible_RV, ids_R, shard)

    masked_RV = torch.where(torch.tensor(allowed), logits_RV, float("-inf"))
    all_logprobs = masked_RV.log_softmax(-1)
    best = all_logprobs.sort(dim=-1, descending=True, stable=True)
    real, of_ids = best.values[:, :TOP].isfinite(), all_logprobs.gather(1, ids_R.long()[:, None])
    parts = [of_rank(ONE_RANK, 0)] if ranks == 1 else []
    parts += on_ranks(ranks, lambda ops: of_rank(NkiContext(ranks, ops, launch=simulated.serve), ops.rank))
    assert torch.equal(torch.cat([masked for masked, _ in parts[-ranks:]], 1)[:, :count], masked_RV)
    assert all(
        (masked[:, count - first :] == -math.inf).all()
        for first, (masked, _) in zip(range(0, count, -(-count // ranks)), parts[-ranks:], strict=False)
    )
    for _, scores in parts:
        torch.testing.assert_close(scores[:, 0], of_ids[:, 0], atol=2e-6, rtol=0)
        assert scores[:, 1].tolist() == (all_logprobs >= of_ids).sum(-1).tolist()
        assert torch.equal(scores[:, 2 + TOP :][real].long(), best.indices[:, :TOP][real])
        torch.testing.assert_close(scores[:, 2 : 2 + TOP][real], best.values[:, :TOP][real], atol=2e-6, rtol=0)
        assert (scores[:, 2 : 2 + TOP][~real] < -1e20).all()
