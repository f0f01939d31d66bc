"""XlaRunner on a PJRT plugin: a CPU plugin, registered as `neuron`, whose devices are named cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import UserError
from model.graph_key import GraphKey, Stage
from tests.compile.test_ranks import REQUESTS
from tests.model.family import graphs
from tests.runtime.neffs import ROOT, find_stand_ins
from tests.stand_ins import PLUGIN
from trnspec.bundle.manifest import Compiler, flag_tag
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.runtime import xla

_PROGRAM = """
import json, os, sys
from pathlib import Path
from model.graph_io import zeros_of
from model.graph_key import Stage
from tests.compile.test_ranks import REQUESTS
from trnspec.bundle.opening import open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.runtime.xla import XlaRunner

runner = XlaRunner(open_bundle(Path(sys.argv[1])), "neuron")
graph = next(g for g in runner.bundle.graphs if g.key.stage is Stage.PREFILL)
runner.prepare(graph.key)
before = [runner._state[t.name] for t in graph.state]
runner.launch(graph.key, zeros_of(graph.inputs))
print(json.dumps({
    "ids": [r.ids for r in Engine(runner, engine_config(runner.bundle)).run(REQUESTS)],
    "copied": sum(not array.is_deleted() for array in before),
    "flags": [os.environ.get(name) for name in ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG")],
    "devices": [runner._devices[0].platform, len(runner._devices)],
}))
"""


@pytest.mark.slow
def test_two_ranks_emit_the_ids_of_the_cpu_with_caches_in_place(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bundle without NEFFs: default flags, and the LNC of trn2."""
    cpu = graphs(family, "chain", tp=2)
    find_stand_ins(monkeypatch, PLUGIN)
    command = [sys.executable, "-c", _PROGRAM, str(cpu.bundle.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ids": [r.ids for r in Engine(cpu, engine_config(cpu.bundle)).run(REQUESTS)],
        "copied": 0,
        "flags": ["--model-type transformer --auto-cast none -O2 --lnc 2", "2"],
        "devices": ["cpu", 2],
    }


def test_flags_and_lnc_of_a_bundle_reach_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tags of the manifest; flags in the environment have precedence, and a different LNC is refused."""
    key = GraphKey(Stage.STEP, 3, 128)
    compiler = Compiler("compiler", "neff", "trn2", 1, {flag_tag(key): "--lnc=1 -O1"}, {})
    for name in ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    xla.set_lnc(compiler)
    xla.set_flags(compiler, key)
    assert (os.environ["NEURON_LOGICAL_NC_CONFIG"], os.environ["NEURON_CC_FLAGS"]) == ("1", "--lnc=1 -O1")
    monkeypatch.setattr(xla, "_FLAGS_OF_USER", "-O3")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    xla.set_flags(compiler, key)
    assert os.environ["NEURON_CC_FLAGS"] == "-O3"
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(UserError, match="_NC_CONFIG is 2 and the bundle was compiled for 1; unset it"):
        xla.set_lnc(compiler)
