"""A batch of drafted sequences as probabilities, launched through the rejection kernels or the law."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_kernels.sampling import law
from nki_kernels.sampling.host import (
    Proposal,
    Shard,
    accept_block,
    accept_rejection,
    block_weights,
    rejection_sample,
)
from tests.nki_kernels.sampling.inputs import NO_FLOOR, one

# a bias that leaves no mass
NOTHING = np.float32(-1e30)


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
            drawn = (weight.reshape(-1, 1), drafted, self.noise.reshape(-1, vocabulary)[:, mine].copy())
            shard = Shard(logits[0][:, mine].copy(), one(int(columns[0])))
            parts.append(rejection_sample(shard, logits[1][:, mine].copy(), scales, drawn, lnc=lnc))
        sums, values, ids = (np.concatenate([p[i] for p in parts]) for i in range(3))
        shape = (-1, batch, rows)
        return sums.reshape(-1, 3, batch, rows), values.reshape(shape), ids.reshape(shape)

    def run(self, shards: int = 1, lnc: int = 1, block: bool = False) -> list[list[int]]:
        """What each sequence emits, by the kernels: the classic rule, or block verification."""
        batch, rows, _ = self.target.shape
        proposal = Proposal(self.drafts, np.zeros((batch, 1), np.int32), self.limits)
        sums, values, ids = self.launch(shards, lnc, np.ones((batch, rows), np.float32))
        if block:
            rho = block_weights(sums)
            sums, values, ids = self.launch(shards, lnc, rho)
            accepted, counts, following, reached = accept_block(sums, (values, ids), (rho, self.u), proposal)
        else:
            accepted, counts, following, reached = accept_rejection(sums, values, ids, self.u, proposal)
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
