"""A bundle driven by a host as NxDI's: the tokens are the target's alone, in batches that fill and empty."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compile.device_check.nxdi_host import Host, Model, Sequence, Tensors
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import nxdi_tag
from compile.neuron.sdk import nxdi_graphs, nxdi_tags
from model.attention import KEY_TILE
from model.graph_io import StepInputs
from model.graph_key import Stage
from model.graph_spec import GraphSpec
from model.weights import shard_file
from tests.compile.tiny import spec, write_noisy_pair
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

# a chunk for each bucket: the host pads a whole prompt to one
SIZES: dict[str, Any] = {"batch": 3, "max_len": 256, "k": 2, "chunks": (128, 256)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noisy_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(base: Path) -> XlaRunner:
    return AsTheyRun(read_bundle(untraced(spec(base, "pair", **SIZES))))


def sequences() -> list[Sequence]:
    """Of several lengths; two sampled, one past the first bucket, one to the end of the cache."""
    return [
        Sequence((5, 9, 2, 7), 9),
        Sequence((8, 1), 21, (0, 1.0, 0.9)),
        Sequence((6, 2, 1, 1, 9) * 25, 7),
        Sequence((3, 3, 4), 12, (9, 0.8, 1.2)),
        Sequence((4,), 30),
        Sequence((7, 7) * 122, 40),
        Sequence((1, 2), 5),
    ]


class OwnGraphs:
    """The bundle's graphs behind NxDI's inputs, which name no seed: noise is of the cache line and its prompts."""

    def __init__(self, graphs: XlaRunner) -> None:
        self.graphs, self.counts = graphs, Counter[int]()

    def __call__(self, graph: GraphSpec, given: Tensors) -> list[np.ndarray]:
        lines = given[3]
        if graph.key.is_prefill:
            self.counts[int(lines[0])] += 1
        limits = np.full(lines.shape, graph.key.k, np.int32)
        seeds = np.array([(line, self.counts[int(line)]) for line in lines], np.int32)
        own_L = np.arange(graph.key.bucket // KEY_TILE, dtype=np.int32)
        table = 1 + lines[:, None] * (SIZES["max_len"] // KEY_TILE) + own_L
        following = np.array([-1], np.int32)
        inputs = StepInputs(*given[:5], np.zeros(lines.shape, np.float32), seeds, limits, table, following)
        results, of_draft = list(self.graphs.run(graph.key, inputs))[:4], graph.key._replace(stage=Stage.PREFILL_DRAFT)
        if graph.key.is_prefill and of_draft in self.graphs.bundle.plan.by_key:
            self.graphs.draft(of_draft, inputs)
        return results


class ModelPt:
    """The modules that ModelBuilder would trace for model.pt, on one rank."""

    def __init__(self, base: Path, path: Path, **changes: Any) -> None:
        plan = self.plan = make_plan(spec(base, **(SIZES | changes)).bundle)
        self.ranks = EagerRanks(plan, nxdi_tags(plan), [load_file(path / shard_file(0))])

    def __call__(self, graph: GraphSpec, given: Tensors) -> list[np.ndarray]:
        return [
            r.numpy() for r in self.ranks(nxdi_tag(graph.key, self.plan.spec), [torch.from_numpy(x) for x in given])
        ]


def _served(graphs: list[GraphSpec], model: Model, k: int, arrive: int, host: type[Host] = Host) -> list[Sequence]:
    asked, served = sequences(), host(graphs, model, k, SIZES["max_len"])
    asked[0].end = asked[4].end = 41
    served.serve(asked, arrive)
    assert {1, arrive} < set(served.batches), "whole and partial batches"
    assert set(served.counts) == set(range(1, k + 2)), "steps that emit any number of tokens"
    return asked


def _alone(graphs: XlaRunner, served: list[Sequence]) -> list[list[int]]:
    """The target's own tokens, with the noise of the lines that the sequences had."""
    engine = Engine(graphs, engine_config(graphs.bundle), speculative=False)
    requests, counts = [], Counter[int]()
    for s in served:
        counts[s.line] += 1
        top_k, top_p, temperature = s.params
        seed = s.line + (counts[s.line] << 32)
        params = Params() if top_k == 1 else Params(temperature, int(top_k), top_p, seed=seed)
        requests.append(Request(s.prompt, params, s.new_tokens, (s.end,)))
    return [r.ids for r in engine.run(requests)]


def _agree(graphs: XlaRunner, served: list[Sequence]) -> bool:
    expected = _alone(graphs, served)
    # the host ends a sequence whose next step would not fit; the engine emits what still fits
    assert len(served[5].ids) < 15
    return all(s.ids and s.ids == ids[: len(s.ids)] for s, ids in zip(served, expected, strict=True)) and all(
        len(s.ids) == len(ids) for i, (s, ids) in enumerate(zip(served, expected, strict=True)) if i != 5
    )


def _routed(graphs: XlaRunner) -> list[GraphSpec]:
    return _of_nxdi(graphs.bundle)


def _of_nxdi(bundle: Bundle) -> list[GraphSpec]:
    """The graphs that NxDI knows: those of steps without filters are for our own host."""
    return [g for tag in nxdi_tags(bundle.plan) for g in nxdi_graphs(bundle.plan, tag)]


def test_the_bundle_s_graphs_emit_the_target_s_tokens(pair: XlaRunner) -> None:
    served = _served(_routed(pair), OwnGraphs(pair), 2, 3)
    assert _agree(pair, served)
    assert len({s.line for s in served}) == 3


def test_so_does_the_module_for_model_pt(base: Path, pair: XlaRunner) -> None:
    assert _agree(pair, _served(_routed(pair), ModelPt(base, pair.bundle.path), 2, 2))


def test_and_the_target_alone_with_one_result_a_step(base: Path, pair: XlaRunner) -> None:
    alone = read_bundle(untraced(spec(base, "alone", **(SIZES | {"k": 0}))))
    served = _served(_of_nxdi(alone), ModelPt(base, alone.path, k=0), 0, 3)
    assert _agree(pair, served)


class TakesAll(Host):
    """Takes every row of a step as emitted."""

    def count(self, following: int, position: int) -> int:
        return self.rows


def test_a_host_of_another_contract_would_be_noticed(pair: XlaRunner) -> None:
    with pytest.raises(AssertionError, match="the next id is the last accepted"):
        _served(_routed(pair), OwnGraphs(pair), 2, 3, TakesAll)
