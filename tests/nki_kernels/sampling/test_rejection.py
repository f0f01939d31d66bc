"""Rejection sampling: a shard's sums and draws against fp64, and the rule against the law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.sampling.host import Proposal, Shard, accept_block, accept_rejection, block_weights, rejection_sample
from tests.nki_kernels.sampling.batch import NOTHING, Batch
from tests.nki_kernels.sampling.inputs import DTYPES, NO_FLOOR, Dims, merged, one

SHAPES = [Dims(5, 333, 7), Dims(3, 4747, 9495, "bf16"), Dims(1, 50, 3), Dims(32, 4748, 14244), Dims(4, 151936)]


def scales_of(logits: Any, temperature: float, floor: float = float(NO_FLOOR)) -> Any:
    """(R, 3): factor, bias and floor that make probabilities of whole rows of logits."""
    numbers = np.where(logits >= floor, logits.astype(np.float64) / temperature, -np.inf)
    top = numbers.max(1, keepdims=True)
    bias = -top - np.log(np.exp(numbers - top).sum(1, keepdims=True))
    scales = np.concatenate([np.full_like(bias, 1 / temperature), bias, np.full_like(bias, floor)], 1)
    return scales.astype(np.float32)


def probabilities(logits: Any, scales: Any) -> Any:
    numbers = logits.astype(np.float64)
    return np.exp(numbers * scales[:, 0:1] + scales[:, 1:2]) * (numbers >= scales[:, 2:3])


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_shard(dims: Dims, lnc: int) -> None:
    rng, kind = np.random.default_rng(2), DTYPES[dims.dtype]
    target = (3 * rng.standard_normal((dims.R, dims.V))).astype(kind)
    draft = (target.astype(np.float32) + rng.standard_normal((dims.R, dims.V))).astype(kind)
    scales = np.concatenate([scales_of(target, 0.8), scales_of(draft, 0.8, 0.5)], 1)
    scales[-1, 4] = NOTHING
    weight = rng.uniform(0.5, 1, (dims.R, 1)).astype(np.float32)
    drafted = (dims.start + rng.integers(-50, dims.V + 50, (dims.R, 1))).astype(np.int32)
    noise = rng.gumbel(size=(dims.R, dims.V)).astype(np.float32)
    shard, drawn = Shard(target, one(dims.start)), (weight, drafted, noise)
    sums, values, ids = rejection_sample(shard, draft, scales, drawn, lnc=lnc)
    p, q = probabilities(target, scales[:, :3]), probabilities(draft, scales[:, 3:])
    residual = np.maximum(weight * p - q, 0)
    place = drafted - dims.start
    inside = (place >= 0) & (place < dims.V)
    at = np.clip(place, 0, dims.V - 1)
    expected = np.stack([*((np.take_along_axis(x, at, 1) * inside)[:, 0] for x in (p, q)), residual.sum(1)])
    assert np.abs(sums.sum(0) - expected).max() <= 1e-5
    assert np.array_equal(merged(values, ids), (residual * np.exp(noise)).argmax(1) + dims.start)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("batch", "k", "vocabulary"), [(7, 3, 29), (16, 7, 130), (40, 2, 9), (1, 1, 300)])
@pytest.mark.parametrize("block", [False, True], ids=["classic", "block"])
def test_the_rule(batch: int, k: int, vocabulary: int, shards: int, block: bool) -> None:
    """Token for token the law's; drafts near the target, so that all lengths occur."""
    lengths = set()
    for seed in range(4):
        x = Batch(batch, k, vocabulary, seed)
        emitted = x.run(shards, 1 + seed % 2, block)
        assert emitted == [x.law(b, block) for b in range(batch)]
        lengths |= {len(row) for row in emitted}
    assert len(lengths) > 1 or batch == 1


def test_blocks_accept_more() -> None:
    """The reason for block verification, on the same drafts: more tokens a step on average."""
    emitted = [sum(len(row) for seed in range(6) for row in Batch(16, 4, 12, seed, 1.5).run(block=b)) for b in (0, 1)]
    assert emitted[1] > emitted[0]


@pytest.mark.parametrize("block", [False, True], ids=["classic", "block"])
def test_limits(block: bool) -> None:
    """A draft beyond the limit is not taken, and the token at the limit is drawn from the target alone."""
    x = Batch(12, 3, 20, noise=0.05)
    x.limits = np.array([[0], [1], [2], [3]] * 3, np.int32)
    emitted = x.run(block=block)
    assert emitted == [x.law(b, block) for b in range(12)]
    assert max(len(row) for row in emitted[0::4]) == 1


def test_no_residual_mass_is_acceptance() -> None:
    """Draft equal to target: the largest u never rejects, for there is nothing else to draw."""
    x = Batch(6, 4, 25)
    x.draft = x.target[:, :4].copy()
    x.u[:] = np.nextafter(np.float32(1), np.float32(0))
    assert [row[:4] for row in x.run()] == [list(row) for row in x.drafts]


def test_rounding_that_leaves_no_residual_is_acceptance() -> None:
    """The draft's probability of its token rounds above the target's, and no id has more of the target: accepted."""
    x = Batch(2, 1, 8)
    x.target[:, 0] = x.draft[:, 0] = np.eye(8)[3]
    x.draft[:, 0, 3] = 1 + 1e-6
    x.drafts[:], x.u[:] = 3, np.nextafter(np.float32(1), np.float32(0))
    assert [row[0] for row in x.run()] == [3, 3]


def test_an_impossible_draft_is_rejected() -> None:
    """A draft that the target never draws falls at any u, and its place is taken from the residual."""
    x = Batch(5, 1, 10)
    x.target[:, 0, 4], x.drafts[:], x.u[:] = 0, 4, 1e-6
    x.target[:, 0] /= x.target[:, 0].sum(-1, keepdims=True)
    emitted = x.run()
    assert emitted == [x.law(b) for b in range(5)]
    assert all(len(row) == 1 and row[0] != 4 for row in emitted)


def test_a_shard_without_residual_mass_does_not_win() -> None:
    """Where the draft has more of every id the best score is 0, which any shard with mass beats."""
    logits, noise = np.zeros((3, 40), np.float32), np.random.default_rng(0).gumbel(size=(3, 40)).astype(np.float32)
    scales = np.tile(np.array([1, -5, NO_FLOOR, 1, -4, NO_FLOOR], np.float32), (3, 1))
    drawn = np.ones((3, 1), np.float32), np.zeros((3, 1), np.int32), noise
    sums, values, _ = rejection_sample(Shard(logits, one(0)), logits, scales, drawn)
    assert not sums[:, 2].any()
    assert not values.any()


def one_draft(target: float, draft: float, mass: float) -> tuple[Any, Any, Any, Proposal]:
    """Sums, values, ids and the proposal of one sequence with one draft, on one shard."""
    sums = np.array([[target, 0], [draft, 0], [mass, 1]], np.float32)[None, :, None]
    zero = np.zeros((1, 1), np.int32)
    return sums, np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 7, np.int32), Proposal(zero, zero, zero + 1)


@pytest.mark.parametrize(("u", "count"), [(0.5, 1), (np.nextafter(np.float32(0.5), np.float32(0)), 2)])
def test_equality_rejects(u: float, count: int) -> None:
    """u draft = target is not below target: 0.5 x 0.5 against 0.25."""
    sums, values, ids, proposal = one_draft(0.25, 0.5, 0.1)
    uniforms = np.array([[u, 0.5]], np.float32)
    assert accept_rejection(sums, values, ids, uniforms, proposal)[1].item() == count


@pytest.mark.parametrize(("u", "count"), [(0.5, 2), (np.nextafter(np.float32(0.5), np.float32(1)), 1)])
def test_equality_accepts_a_block(u: float, count: int) -> None:
    """u (mass + 1 - rho) <= mass at equality: 0.5 x (0.25 + 1 - 0.75) against 0.25."""
    sums, values, ids, proposal = one_draft(0.25, 0.5, 0)
    sums[0, 2, 0, 1] = 0.25
    weigh = np.array([[1, 0.75]], np.float32), np.array([[0, u]], np.float32)
    assert accept_block(sums, (values, ids), weigh, proposal)[1].item() == count


@pytest.mark.parametrize("draft", [2.0**-10, 2.0**-60, 2.0**-90])
def test_a_small_draft_probability_divides(draft: float) -> None:
    """rho is target / draft however small both are."""
    sums, *_ = one_draft(draft / 2, draft, 0)
    assert block_weights(sums).tolist() == [[1, 0.5]]
