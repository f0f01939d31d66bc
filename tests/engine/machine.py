"""A runner that computes no model: a token is a function of all that its row can see.

Its KV pool holds tokens, written and read through block tables, so that a wrong block, position, count or mask changes
every later token. Half of the drafts are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.logits_processors import FORBIDDEN, PROMPT_FLAG
from model.logprobs import TOP
from model.sampling import NO_ID
from trnspec.bundle.spec import logprobs_prompt
from trnspec.engine.config import EngineConfig
from trnspec.engine.masks import allows

V, BLOCK, LENGTH, BATCH, K = 96, 128, 512, 3, 3
CONFIG = EngineConfig((1, K), BATCH, LENGTH, (BLOCK, LENGTH), V, 9, ((128, 128), (128, 512), (256, 512)))


def graph_keys(config: EngineConfig) -> Iterator[GraphKey]:
    """The graphs of a bundle's plan."""
    yield from (GraphKey(Stage.PREFILL, config.k, bucket, rows=rows) for rows, bucket in config.prompts)
    rows, bucket = logprobs_prompt(config.prompts, config.max_len)
    yield GraphKey(Stage.PREFILL_LOGPROBS, config.k, bucket, rows=rows)
    for bucket in config.buckets:
        yield from (GraphKey(Stage.STEP, k, bucket, filters) for k in (0, *config.ks) for filters in (False, True))
        halves = (Stage.VERIFY,) if config.host_drafts or not config.k else (Stage.DRAFT, Stage.VERIFY)
        yield from (GraphKey(stage, config.k, bucket) for stage in halves)


class Machine:
    """The device of an engine: `keys` are the graphs that ran, `cleared` the slots and blocks that were cleared.

    A `strict` one refuses rows without a block, as an outer scheduler gives them.
    """

    def __init__(self, config: EngineConfig = CONFIG, chance: float = 0.5, strict: bool = False) -> None:
        self.pool, self.chance, self.strict = np.full((config.pool, BLOCK), -9, np.int64), chance, strict
        self.config, self.counts = config, np.zeros((BATCH, V), np.int64)
        self.keys, self.cleared, self.loaded = list[GraphKey](), list[tuple[int, tuple[int, ...]]](), set[GraphKey]()
        self.bundle: Any = SimpleNamespace(plan=SimpleNamespace(by_key=dict.fromkeys(graph_keys(config))))
        # tokens of prompts that were computed
        self.prefilled = 0

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self._check(key, inputs)
        return self._prefill(key, inputs) if key.is_prefill else self._step(key, inputs)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """The newest tokens and k drafts after each."""
        self._check(key, inputs)
        rows = [self._drafts(inputs, slot, key.k) for slot in range(BATCH)]
        return np.concatenate((np.asarray(inputs.input_ids), np.array(rows)), 1)

    def _check(self, key: GraphKey, inputs: StepInputs) -> None:
        """Only graphs of the plan run, on ids of their shape."""
        assert key in self.bundle.plan.by_key
        rows = key.k + 1 if key.stage is Stage.VERIFY or self.config.host_drafts else 1
        shape = (1, key.rows) if key.is_prefill else (BATCH, rows)
        assert inputs.input_ids.shape == shape
        self.keys.append(key)

    def prepare(self, key: GraphKey, warm: bool = True) -> None:
        self.loaded.add(key)

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        self.cleared.append((slot, tuple(blocks)))

    def _prefill(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        first, count, slot = (int(x[0]) for x in (inputs.positions, inputs.num_tokens, inputs.slots))
        table, ids = inputs.block_table[0], inputs.input_ids[0, :count].tolist()
        assert 0 < count <= key.rows
        assert first + count <= key.bucket
        self.prefilled += count
        self._write(table, first, ids)
        if key.full_sampling:
            self.counts[slot] = inputs.prompt_token_counts[0]
        visible = self._read(table, first + count)
        token = self._sample(visible, inputs, 0, 0, slot)
        following = int(inputs.next_prompt_id[0])
        if following < 0 <= token:
            self.counts[slot, token] += 1
        scores = np.zeros((1, key.rows, 2 + 2 * TOP), np.float32)
        for row, scored in enumerate([*ids[1:], token if following < 0 else following]):
            scores[0, row] = score_of(visible[: first + row + 1], scored)
        accepted = np.full((1, key.k + 1), -1)
        accepted[0, 0] = token
        if key.stage is Stage.PREFILL:
            scores = scores[:, count - 1 : count]
        return StepOutputs(accepted, accepted[:, :1], np.array([first + count]), scores=scores)

    def _step(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        accepted, positions = np.full((BATCH, key.k + 1), -1), np.array(inputs.positions)
        scores = np.zeros((BATCH, key.k + 1, 2 + 2 * TOP), np.float32)
        for slot in np.flatnonzero(inputs.block_table[:, 0]):
            table, first = inputs.block_table[slot], int(positions[slot])
            assert first + inputs.k_limits[slot] < LENGTH - 1, "no draft is accepted for the last position"
            ids = np.asarray(inputs.input_ids)[slot].tolist()
            drafts = ids[1:] if len(ids) > 1 or not key.k else self._drafts(inputs, slot, key.k)
            # all rows are written, those of rejected drafts too
            self._write(table, first, [ids[0], *drafts])
            visible = self._read(table, first + 1)
            for row in range(key.k + 1):
                token = self._sample(visible, inputs, slot, row, slot)
                accepted[slot, row], scores[slot, row] = token, score_of(visible, token)
                visible.append(token)
                if row >= inputs.k_limits[slot] or drafts[row] != token:
                    break
            new = [token for token in accepted[slot].tolist() if token >= 0]
            np.add.at(self.counts[slot], new, 1)
            positions[slot] = first + row + 1
        last = (accepted != -1).sum(1) - 1
        next_ids = np.take_along_axis(accepted, np.maximum(last, 0)[:, None], 1)
        return StepOutputs(accepted, next_ids, positions, scores=scores if key.full_sampling else None)

    def _drafts(self, inputs: StepInputs, slot: int, k: int) -> list[int]:
        """Drafts as a draft model makes them: the first ones are right."""
        table, first, drafts = inputs.block_table[slot], int(np.asarray(inputs.positions)[slot]), list[int]()
        visible = [*self._read(table, first), int(np.asarray(inputs.input_ids)[slot, 0])]
        for _ in range(k):
            token = self._sample(visible, inputs, slot, len(drafts), slot)
            luck = random.Random(f"{visible} {inputs.seeds[slot]}").random() < self.chance
            # a draft may fail to sample
            drafts.append(token if luck else NO_ID if token % 5 == 0 else (token + 1) % V)
            visible.append(drafts[-1])
        return drafts

    def _write(self, table: np.ndarray, first: int, ids: list[int]) -> None:
        for position, token in enumerate(ids, first):
            has_block = position < BLOCK * len(table) and table[position // BLOCK] > 0
            assert has_block or position >= LENGTH or not self.strict
            if has_block:
                self.pool[table[position // BLOCK], position % BLOCK] = token

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        return self.pool[table].reshape(-1)[:length].tolist()

    def _sample(self, visible: list[int], inputs: StepInputs, row: int, n: int, slot: int) -> int:
        """The token after these: of its seed, and in full sampling of the counts of the request's tokens."""
        counts = list[int]()
        if inputs.penalties is not None and inputs.penalties[row, 1]:
            # in a step those that it has emitted before the row are not counted yet
            new = visible[int(inputs.positions[row]) + 1 :] if inputs.num_tokens is None else []
            emitted = self.counts[slot].copy()
            np.add.at(emitted, [token for token in new if token >= 0], 1)
            counts = sorted(
                (int(t), int(emitted[t] % PROMPT_FLAG), int(emitted[t] >= PROMPT_FLAG)) for t in emitted.nonzero()[0]
            )
        rng = random.Random(f"{visible} {inputs.seeds[row].tolist()} {counts}")
        if inputs.allowed is None:
            return rng.randrange(V)
        mask = inputs.allowed[row, min(n, inputs.allowed.shape[1] - 1)]
        ids = [token for token in range(V) if allows(mask, token)]
        return rng.choice(ids) if ids else NO_ID


def score_of(visible: list[int], token: int) -> np.ndarray:
    """A log-probability and a rank of what is seen, and top ids; the second one is excluded."""
    rng = random.Random(f"{visible} {token}")
    best = [FORBIDDEN if place == 1 else -rng.random() for place in range(TOP)]
    return np.array([-rng.random(), 1 + token, *best, *range(TOP)], np.float32)
