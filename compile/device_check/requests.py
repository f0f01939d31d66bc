"""The requests that every route to a device answers, in rounds of a whole batch, and how the answers are judged.

A request's place in its round is its slot, and its round the number of prompts that the slot has had: by these NxDI's
model keys its noise, and the same two words are the seeds of our own graphs. So noise does not depend on how many
drafts were accepted before.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from compile.bundle.cutting import Cutter
from compile.device_check import nxdi_host
from compile.device_check.judge import Drawing, Judge
from compile.neuron.flags import nxdi_tag
from compile.neuron.sdk import nxdi_graphs, nxdi_tags
from model.errors import UserError
from model.graph_spec import GraphSpec
from model.sampling import gumbel
from model.weights import shard_file
from trnspec.bundle.plan import BundlePlan

# at this temperature noise alone draws, for target and draft alike: every draft is accepted
_HOT = 1e30
_HOT_PROMPT = (7, 70, 700)
# how many more steps than the CPU's a device may need, whose near ties refuse a draft now and then
_MORE_STEPS = 1.25
GREEDY = Drawing()


@dataclass(frozen=True)
class Asked:
    """A request: a prompt, how many ids behind it, and how they are drawn."""

    name: str
    prompt: tuple[int, ...]
    count: int
    drawing: Drawing = GREEDY

    @property
    def is_hot(self) -> bool:
        return self.drawing.temperature == _HOT


class Answer(NamedTuple):
    """The ids of a request, and the steps that it took behind its prompt."""

    ids: list[int]
    steps: int


# a round of requests -> their answers
Route = Callable[[Sequence[Asked]], list[Answer]]


def _prompt(length: int) -> tuple[int, ...]:
    return tuple(40 + 3 * i % 800 for i in range(length))


def asked(plan: BundlePlan) -> Iterator[Asked]:
    """Requests for a pair of some batch and length, which must have two buckets.

    One to the context's end; prompts of one id, of a bucket's border, and beyond the first bucket; each way of drawing;
    slots that were used before; then hot ones, until every id of the vocabulary has been drawn.
    """
    spec = plan.spec
    first, end = spec.buckets[0], spec.max_len
    listed = [
        Asked("greedy, to the end", _prompt(20), end),
        Asked("top-k and top-p, a prompt beyond the first bucket", _prompt(first + 22), 60, Drawing(20, 0.9, 0, 0.8)),
        Asked("temperature", _prompt(30), 60, Drawing(temperature=1.3)),
        Asked("top-p", _prompt(25), 60, Drawing(top_p=0.9, temperature=1.0)),
        Asked("greedy, one id", _prompt(1), 12),
        Asked("greedy, a bucket less one", _prompt(first - 1), 12),
        Asked("greedy, a bucket", _prompt(first), 12),
        Asked("top-k", _prompt(12), 40, Drawing(20, temperature=0.8)),
    ]
    listed = [replace(a, drawing=replace(a.drawing, seed=_seed(i, spec.batch))) for i, a in enumerate(listed)]
    yield from listed
    missing, number = set(range(spec.target_config.vocab_size)), len(listed)
    # NxDI's host ends before a step would pass the last position
    positions = torch.arange(len(_HOT_PROMPT), end - spec.k)
    while missing or number % spec.batch:
        seed = torch.tensor([_seed(number, spec.batch)], dtype=torch.int32).expand(len(positions), -1)
        missing -= set(gumbel(seed, positions, spec.target_config.vocab_size).argmax(-1).tolist())
        yield Asked("hot", _HOT_PROMPT, end, Drawing(temperature=_HOT, seed=_seed(number, spec.batch)))
        number += 1


def _seed(number: int, batch: int) -> tuple[int, int]:
    return number % batch, 1 + number // batch


def judged(plan: BundlePlan, target: Path, route: Route, cpu: Route) -> dict[str, Any]:
    """Facts of a route whose every id is the target's own draw, and that accepts as many drafts as the CPU.

    Raises:
        UserError: the first request that is answered otherwise.
    """
    spec, judge = plan.spec, Judge(target, plan.spec.dtype)
    requests, rows = asked(plan), spec.k + 1
    seen, count, steps, expected = set[int](), 0, 0, 0
    first = True
    while batch := list(itertools.islice(requests, spec.batch)):
        answers = route(batch)
        for request, answer in zip(batch, answers, strict=True):
            _check(request, answer, judge, spec.max_len, rows)
            seen.update(answer.ids)
            count, steps = count + len(answer.ids), steps + (answer.steps if first else 0)
        if first:
            expected = sum(answer.steps for answer in cpu(batch))
            if steps > _MORE_STEPS * expected:
                raise UserError(f"the first requests took {steps} steps, {expected} on the CPU: drafts are refused")
        first = False
    return {
        "ids": count, "different_ids": len(seen), "near_ties": judge.ties, "tolerance": judge.tolerance,
        "steps_of_the_first": [steps, expected],
    }  # fmt: skip


def _check(request: Asked, answer: Answer, judge: Judge, max_len: int, rows: int) -> None:
    wanted = min(request.count, max_len - (rows - 1) - len(request.prompt))
    if len(answer.ids) < wanted:
        raise UserError(f"{request.name}: {len(answer.ids)} ids came, {wanted} were wanted")
    if fault := judge.fault(request.prompt, answer.ids, request.drawing):
        raise UserError(f"{request.name}, slot {request.drawing.seed[0]}: {fault}")
    if request.is_hot and answer.steps > 1 + -(-len(answer.ids) // rows):
        raise UserError(f"{request.name}: {len(answer.ids)} ids took {answer.steps} steps, though noise alone draws")


# a graph's tag, NxDI's seven inputs -> the results before the caches
Model = Callable[[str, list[Tensor]], list[np.ndarray]]


def nxdi_route(plan: BundlePlan, model: Model) -> Route:
    """The answers of a model.pt to NxDI's host; greedy is top-k 1 at temperature 1 there."""
    graphs = [graph for tag in nxdi_tags(plan) for graph in nxdi_graphs(plan, tag)]

    def run(graph: GraphSpec, inputs: nxdi_host.Tensors) -> list[np.ndarray]:
        return model(nxdi_tag(graph.key, plan.spec), [torch.from_numpy(np.ascontiguousarray(x)) for x in inputs])

    host = nxdi_host.Host(graphs, run, plan.spec.k, plan.spec.max_len)

    def answer(batch: Sequence[Asked]) -> list[Answer]:
        sequences = [nxdi_host.Sequence(a.prompt, a.count, _params(a.drawing)) for a in batch]
        host.serve(sequences, plan.spec.batch)
        return [Answer(s.ids, s.steps) for s in sequences]

    return answer


def _params(drawing: Drawing) -> tuple[float, float, float]:
    if not drawing.temperature:
        return 1, 1.0, 1.0
    return drawing.top_k or -1, drawing.top_p, drawing.temperature


def shard_of(plan: BundlePlan, folders: Mapping[str, Path], rank: int) -> dict[str, Tensor]:
    """A rank's weights by their names in the bundle, cut from the checkpoints in these folders."""
    with tempfile.TemporaryDirectory() as folder:
        path, cutter = Path(folder) / shard_file(rank), Cutter(plan, folders, Path(folder) / "sources")
        path.parent.mkdir()
        cutter.due([shard_file(rank)], Path(folder))
        cutter.write(rank, path)
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
