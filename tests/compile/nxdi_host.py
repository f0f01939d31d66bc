"""The host of NxDI's engines (model_wrapper.py, hf_adapter.py, vLLM's V0 loader), in our words.

Prompts come one at a time, padded on the right with position 1; a step gets every live sequence, rows short of the
batch are copies of the first with the idle cache lines, all sorted by line; the list of input shapes selects the model;
greedy is top-k 1 at temperature 1; a sequence ends when its step would pass the longest bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tensors = tuple[np.ndarray, ...]
# NxDI's seven inputs -> the results before the state
Model = Callable[[Tensors], list[np.ndarray]]


@dataclass
class Served:
    """A request, its position and its ids; in `params`, top-k 1 at temperature 1 is greedy and top-k -1 is off."""

    prompt: tuple[int, ...]
    new_tokens: int
    params: tuple[float, float, float] = (1, 1.0, 1.0)
    end: int = -1
    line: int = -1
    position: int = 0
    mask: Any = None
    ids: list[int] = field(default_factory=list)


class Host:
    """Serves sequences with one compiled model, which has `buckets`; counts the rows and the ids of each step."""

    def __init__(self, model: Model, k: int, batch: int, buckets: Sequence[int]) -> None:
        self.model, self.batch, self.buckets, self.max_len = model, batch, buckets, buckets[-1]
        self.speculation_length = k + 1 if k else 0
        self.batches, self.counts = list[int](), list[int]()

    def serve(self, waiting: list[Served], arrive: int) -> None:
        """Run all sequences to their ends; `arrive` of them may start before each step, on the lowest idle line."""
        waiting, live = list(waiting), list[Served]()
        while waiting or live:
            for _ in range(arrive):
                if waiting and len(live) < self.batch:
                    sequence = waiting.pop(0)
                    sequence.line = min(set(range(self.batch)) - {s.line for s in live})
                    self._prompt(sequence)
                    live.append(sequence)
            live = [s for s in live if not self._ended(s)]
            if live:
                self._step(live)
            live = [s for s in live if not self._ended(s)]

    def _ended(self, s: Served) -> bool:
        full = s.position + 1 >= self.max_len or s.position + self.speculation_length > self.max_len
        done = full or len(s.ids) >= s.new_tokens or s.ids[-1:] == [s.end]
        del s.ids[s.new_tokens :]
        return done

    def _bucket(self, length: int) -> int:
        return next((b for b in self.buckets if length < b), self.max_len)

    def _prompt(self, s: Served) -> None:
        length = len(s.prompt)
        bucket = self._bucket(length)
        rows = [
            np.pad(np.array([values], np.int32), ((0, 0), (0, bucket - length)), constant_values=fill)
            for values, fill in ((s.prompt, 0), ([1] * length, 0), (range(length), 1))
        ]
        self._take([s], self._call((*rows, np.array([s.line]), np.array([s.params]))), prompt=True)

    def _step(self, live: list[Served]) -> None:
        live = sorted(live, key=lambda s: s.line)
        self.batches.append(len(live))
        bucket = self._bucket(max(s.position for s in live) + self.speculation_length)
        masks = np.stack([np.pad(s.mask[:bucket], (0, bucket - len(s.mask[:bucket]))) for s in live])
        ids, positions = np.array([[s.ids[-1]] for s in live]), np.array([[s.position] for s in live])
        lines, params = np.array([s.line for s in live]), np.array([s.params for s in live])
        every = np.array([*lines, *(i for i in range(self.batch) if i not in lines)])
        order = np.argsort(every)
        # rows short of the batch are copies of the first
        copies = np.concatenate([np.arange(len(live)), np.zeros(self.batch - len(live), int)])[order]
        results = self._call((ids[copies], masks[copies], positions[copies], every[order], params[copies]))
        self._take(live, [r[lines] for r in results])

    def _call(self, given: Tensors) -> list[np.ndarray]:
        nothing = np.zeros(given[3].shape, np.int32)
        return self.model((*(x.astype(np.int32) for x in given[:4]), given[4].astype(np.float32), nothing, nothing))

    def _take(self, live: list[Served], results: list[np.ndarray], prompt: bool = False) -> None:
        for row, s in enumerate(live):
            if len(results) == 1:
                new, after = [int(results[0][row])], len(s.prompt) if prompt else s.position + 1
                s.mask = (np.arange(self.max_len) < after).astype(np.int32)
            else:
                accepted, next_ids, next_mask, next_position = (r[row] for r in results)
                after = int(next_position[0])
                count = 1 if prompt else after - s.position
                new, s.mask = [int(t) for t in accepted[:count]], next_mask
                assert set(accepted[count:].tolist()) <= {-1}, "the rest of a row is -1"
                assert new[-1] == next_ids[0], "the next id is the last accepted"
                assert next_mask.sum() == after, "the mask has what is in the cache"
            s.position = after
            self.counts += [] if prompt else [len(new)]
            s.ids += new[: new.index(s.end) + 1] if s.end in new else new
