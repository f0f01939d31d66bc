"""The host of NxDI's engines, in our words: the inputs that it gives to a compiled model, and how it reads the results.

Source: NxDI's model_wrapper.py and hf_adapter.py and vLLM's V0 loader, as read: prompts one at a time, padded on the
right with position 1; a step gets every live sequence, rows short of the batch are copies of the first with the idle
cache lines, all sorted by line, and results are picked by line; the list of input shapes selects the model; greedy is
top-k 1 at temperature 1; tokens are the accepted row to its first -1, their number the next position less the position,
and the host finds the end token in it; a sequence ends when its step would pass the longest bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from model.graph_spec import GraphSpec

Tensors = tuple[np.ndarray, ...]
# the graph, NxDI's seven inputs -> the results before the caches
Model = Callable[[GraphSpec, Tensors], list[np.ndarray]]


@dataclass
class Sequence:
    """A request, its position and its tokens; in `params`, top-k 1 at temperature 1 is greedy and top-k -1 is off."""

    prompt: tuple[int, ...]
    new_tokens: int
    params: tuple[float, float, float] = (1, 1.0, 1.0)
    end: int = -1
    line: int = -1
    position: int = 0
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    ids: list[int] = field(default_factory=list)
    steps: int = 0


class Host:
    """Serves sequences with one compiled model; `graphs` are those of model.pt, of one batch size."""

    def __init__(self, graphs: list[GraphSpec], model: Model, k: int, max_len: int) -> None:
        self.model, self.max_len, self.rows = model, max_len, k + 1
        self.speculation_length = k + 1 if k else 0
        self.steps = [g for g in graphs if not g.key.is_prefill]
        self.batch = self.steps[0].inputs[0].shape[0]
        self.routes = {self._shapes(g): g for g in graphs}
        assert len(self.routes) == len(graphs), "two graphs have one list of input shapes"
        self.batches: list[int] = []
        self.counts: list[int] = []

    def _shapes(self, graph: GraphSpec) -> str:
        ids, mask, positions, lines, params = (t.shape for t in graph.inputs[:5])
        return str([list(s) for s in (ids, mask, positions, lines, params, lines, lines)])

    def serve(self, waiting: list[Sequence], arrive: int) -> None:
        """Run all sequences to their ends; `arrive` of them may start before each step, on the lowest idle line."""
        waiting, live = list(waiting), list[Sequence]()
        while waiting or live:
            for _ in range(arrive):
                if waiting and len(live) < self.batch:
                    sequence = waiting.pop(0)
                    sequence.line = min(set(range(self.batch)) - {s.line for s in live})
                    self._prompt(sequence)
                    live.append(sequence)
            live = [s for s in live if not self._ended(s)]
            if live:
                self.batches.append(len(live))
                self._step(live)
                live = [s for s in live if not self._ended(s)]

    def _ended(self, s: Sequence) -> bool:
        full = s.position + 1 >= self.max_len or s.position + self.speculation_length > self.max_len
        done = full or len(s.ids) >= s.new_tokens or s.ids[-1:] == [s.end]
        del s.ids[s.new_tokens :]
        return done

    def _bucket(self, length: int, prompt: bool) -> int:
        more = 0 if prompt else self.speculation_length
        sizes = sorted({t.shape[1] for g in self.steps for t in g.inputs if t.name == "attention_mask"})
        return next((b for b in sizes if length + more < b), sizes[-1])

    def _prompt(self, s: Sequence) -> None:
        length = len(s.prompt)
        bucket = self._bucket(length, prompt=True)

        def padded(values: object, fill: int) -> np.ndarray:
            return np.pad(np.array([values], np.int32), ((0, 0), (0, bucket - length)), constant_values=fill)

        ids, mask, positions = padded(s.prompt, 0), padded([1] * length, 0), padded(range(length), 1)
        self._take([s], self._call((ids, mask, positions, np.array([s.line]), np.array([s.params]))), prompt=True)

    def _step(self, live: list[Sequence]) -> None:
        live = sorted(live, key=lambda s: s.line)
        bucket = self._bucket(max(s.position for s in live), prompt=False)
        ids = np.array([[s.ids[-1]] for s in live])
        masks = [np.pad(s.mask[:bucket], (0, bucket - len(s.mask[:bucket]))) for s in live]
        positions = np.array([[s.position] for s in live])
        lines = np.array([s.line for s in live])
        given = (ids, np.stack(masks), positions, lines, np.array([s.params for s in live]))
        self._take(live, [self.pick(r, lines) for r in self._call(self.pad(given))])

    def pad(self, given: Tensors) -> Tensors:
        """Inputs of a whole batch: the first row again for each idle line, then all rows in the order of lines."""
        ids, mask, positions, lines, params = given
        lines = np.array([*lines, *(i for i in range(self.batch) if i not in lines)])
        order = np.argsort(lines)

        def whole(x: np.ndarray) -> np.ndarray:
            copies = np.repeat(x[:1], self.batch - len(x), 0)
            picked: np.ndarray = np.concatenate([x, copies])[order]
            return picked

        return whole(ids), whole(mask), whole(positions), lines[order], whole(params)

    def pick(self, result: np.ndarray, lines: np.ndarray) -> np.ndarray:
        """The rows of the live sequences."""
        picked: np.ndarray = result[lines]
        return picked

    def _call(self, given: Tensors) -> list[np.ndarray]:
        nothing = np.zeros(given[3].shape, np.int32)
        whole = [x.astype(np.int32) for x in given[:4]] + [given[4].astype(np.float32), nothing, nothing]
        return self.model(self.routes[str([list(x.shape) for x in whole])], tuple(whole))

    def _take(self, live: list[Sequence], results: list[np.ndarray], prompt: bool = False) -> None:
        for row, s in enumerate(live):
            if len(results) == 1:
                new, following = [int(results[0][row])], len(s.prompt) if prompt else s.position + 1
                s.mask = (np.arange(self.max_len) < following).astype(np.int32)
            else:
                accepted, next_ids, next_mask, next_position = (r[row] for r in results)
                following = int(next_position[0])
                count = 1 if prompt else self.count(following, s.position)
                new, s.mask = [int(t) for t in accepted[:count]], next_mask
                if count < len(accepted):
                    assert set(accepted[count:].tolist()) == {-1}, "the rest of a row is -1"
                assert new[-1] == next_ids[0], "the next id is the last accepted"
                assert next_mask.sum() == following, "the mask keeps what is in the cache"
            s.position = following
            s.steps += not prompt
            self.counts += [] if prompt else [len(new)]
            s.ids += new[: new.index(s.end) + 1] if s.end in new else new

    def count(self, following: int, position: int) -> int:
        """How many tokens a step emitted."""
        return following - position
