"""Rejection sampling: a shard's sums and draws against fp64, and the rule against the law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.sampling import law
from nki_kernels.sampling.host import Shard, Step, accept_block, accept_rejection, block_weights, rejection_sample
from tests.nki_kernels.sampling_inputs import DTYPES, NO_FLOOR, Dims, merged, one

SHAPES = [Dims(5, 333, 7), Dims(3, 4747, 9495, "bf16"), Dims(1, 50, 3), Dims(32, 4748, 14244), Dims(4, 151936)]
# a bias that leaves no mass
NOTHING = np.float32(-1e30)


def scales_of(logits: Any, temperature: float, floor: float = float(NO_FLOOR)) -> Any:
    """(R, 3): factor, bias and floor that make probabilities of whole rows of logits."""
    numbers = np.where(logits >= floor, logits.astype(np.float64) / temperature, -np.inf)
    top = numbers.max(1, keepdims=True)
    bias = -top - np.log(np.exp(numbers - top).sum(1, keepdims=True))
    made = np.concatenate([np.full_like(bias, 1 / temperature), bias, np.full_like(bias, floor)], 1)
    return made.astype(np.float32)


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
    found = rejection_sample(Shard(target, one(dims.start)), draft, scales, (weight, drafted, noise), lnc=lnc)
    sums, values, ids = found
    p, q = probabilities(target, scales[:, :3]), probabilities(draft, scales[:, 3:])
    residual = np.maximum(weight * p - q, 0)
    place = drafted - dims.start
    inside = (place >= 0) & (place < dims.V)
    at = np.clip(place, 0, dims.V - 1)
    expected = np.stack([*((np.take_along_axis(x, at, 1) * inside)[:, 0] for x in (p, q)), residual.sum(1)])
    assert np.abs(sums.sum(0) - expected).max() <= 1e-5
    assert np.array_equal(merged(values, ids), (residual * np.exp(noise)).argmax(1) + dims.start)


class Batch:
    """B sequences of k drafts over V ids: probabilities that lie in fp32, drafts, uniforms and noise."""

    def __init__(self, batch: int, k: int, vocabulary: int, seed: int = 0, noise: float = 0.5) -> None:
        rng = np.random.default_rng(seed)
        self.target = rng.dirichlet(np.ones(vocabulary), (batch, k + 1))
        mixed = self.target[:, :k] + noise * rng.dirichlet(np.ones(vocabulary), (batch, k))
        self.draft = mixed / mixed.sum(-1, keepdims=True)
        self.drafts = np.array([[rng.choice(vocabulary, p=q) for q in row] for row in self.draft], np.int32)
        self.u = rng.random((batch, k + 1)).astype(np.float32)
        self.noise = rng.gumbel(size=self.target.shape).astype(np.float32)
        self.limits = np.full((batch, 1), k, np.int32)

    def launch(self, shards: int, lnc: int, weight: Any) -> tuple[Any, Any, Any]:
        """Sums (M, 3, B, N), values and ids (M, B, N) of the kernel on `shards` shards of the vocabulary."""
        batch, rows, vocabulary = self.target.shape
        draft = np.concatenate([self.draft, np.ones((batch, 1, vocabulary))], 1)
        with np.errstate(divide="ignore"):
            logits = [
                np.maximum(np.log(x.reshape(-1, vocabulary)), -80).astype(np.float32) for x in (self.target, draft)
            ]
        # probabilities as they are: factor 1 and bias 0; rows from the limit on have no draft mass
        scales = np.tile(np.array([1, 0, NO_FLOOR] * 2, np.float32), (batch * rows, 1))
        late = np.arange(rows) >= np.minimum(self.limits, rows - 1)
        scales[late.ravel(), 4] = NOTHING
        drafted = np.concatenate([self.drafts, np.zeros((batch, 1), np.int32)], 1).reshape(-1, 1)
        parts: list[Any] = []
        for columns in np.array_split(np.arange(vocabulary), shards):
            mine = slice(columns[0], columns[-1] + 1)
            given = (weight.reshape(-1, 1), drafted, self.noise.reshape(-1, vocabulary)[:, mine].copy())
            shard = Shard(logits[0][:, mine].copy(), one(int(columns[0])))
            parts.append(rejection_sample(shard, logits[1][:, mine].copy(), scales, given, lnc=lnc))
        sums, values, ids = (np.concatenate([p[i] for p in parts]) for i in range(3))
        shape = (-1, batch, rows)
        return sums.reshape(-1, 3, batch, rows), values.reshape(shape), ids.reshape(shape)

    def run(self, shards: int = 1, lnc: int = 1, block: bool = False) -> list[list[int]]:
        """What each sequence emits, by the kernels: the classic rule, or block verification."""
        batch, rows, _ = self.target.shape
        step = Step(self.drafts, np.zeros((batch, 1), np.int32), self.limits)
        sums, values, ids = self.launch(shards, lnc, np.ones((batch, rows), np.float32))
        if block:
            rho = block_weights(sums)
            sums, values, ids = self.launch(shards, lnc, rho)
            accepted, counts, following, reached = accept_block(sums, (values, ids), (rho, self.u), step)
        else:
            accepted, counts, following, reached = accept_rejection(sums, values, ids, self.u, step)
        assert np.array_equal(reached, counts)
        assert np.array_equal(following[:, 0], accepted[np.arange(batch), counts[:, 0] - 1])
        return [list(map(int, row[:count])) for row, count in zip(accepted, counts[:, 0], strict=True)]

    def law(self, b: int, block: bool = False) -> list[int]:
        limit = int(self.limits[b, 0])
        rule = law.block_verification if block else law.rejection_sample
        return rule(
            self.target[b, : limit + 1],
            self.draft[b, :limit],
            list(self.drafts[b, :limit]),
            list(self.u[b]),
            self.noise[b, : limit + 1],
        )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("batch", "k", "vocabulary"), [(7, 3, 29), (16, 7, 130), (40, 2, 9), (1, 1, 300)])
@pytest.mark.parametrize("block", [False, True], ids=["classic", "block"])
def test_the_rule(batch: int, k: int, vocabulary: int, shards: int, block: bool) -> None:
    """Token for token the law's; drafts near the target, so that all lengths occur."""
    lengths = set()
    for seed in range(4):
        x = Batch(batch, k, vocabulary, seed)
        found = x.run(shards, 1 + seed % 2, block)
        assert found == [x.law(b, block) for b in range(batch)]
        lengths |= {len(row) for row in found}
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
    found = x.run(block=block)
    assert found == [x.law(b, block) for b in range(12)]
    assert max(len(row) for row in found[0::4]) == 1


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
    found = x.run()
    assert found == [x.law(b) for b in range(5)]
    assert all(len(row) == 1 and row[0] != 4 for row in found)
