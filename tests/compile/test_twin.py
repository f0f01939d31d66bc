"""The StableHLO twin of a graph: it gives the graph's ids, and the compiler gets it on request."""

from __future__ import annotations

from pathlib import Path

import pytest
from jaxlib.xla_client import _xla as _jaxlib  # type: ignore[attr-defined]

from compile.build import build
from compile.graph.twin import stablehlo
from tests.compile.tiny import spec
from trnspec.bundle import hlo
from trnspec.bundle.contract import declared
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime import xla as runtime
from trnspec.runtime.xla import XlaRunner

# the last one ends with the context
REQUESTS = [Request((5, 9, 2, 7), Params(0.8, seed=3), 9), Request((6, 2, 1) * 36, Params(), 40)]


def test_it_gives_the_graph_s_ids(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, whose collectives it has too."""
    bundle = read_bundle(build(spec(base, "twin", tp=2)))
    expected = [r.ids for r in Engine(XlaRunner(bundle), engine_config(bundle)).run(REQUESTS)]
    twins = XlaRunner(bundle)
    # jaxlib drops the names of parameters
    monkeypatch.setattr(runtime, "violations", lambda *_: [])
    for key, proto in twins._protos.items():
        text = stablehlo(proto)
        back = hlo.canonical(_jaxlib.mlir.mlir_module_to_xla_computation(text).as_serialized_hlo_module_proto())
        assert declared(back).collectives == declared(proto).collectives
        assert declared(back).aliases == declared(proto).aliases
        twins._protos[key] = back
    assert [r.ids for r in Engine(twins, engine_config(bundle)).run(REQUESTS)] == expected


def test_the_compiler_gets_it_on_request(base: Path, compiler: Path) -> None:
    out = build(spec(base, "stablehlo", k=0, batch=1, compiler_input="stablehlo"))
    for graph in read_bundle(out).graphs:
        assert f"{graph.key.name}.hlo.pb.mlir" in (out / f"logs/{graph.key.name}.txt").read_text(encoding="utf-8")
        (text,) = (out / ".build" / "neuron" / graph.key.name).glob("*.mlir")
        assert "must_alias" in text.read_text(encoding="utf-8")
