"""XlaRunner on a real PJRT plugin, one for CPUs that is registered as `neuron` and calls its devices cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from tests.compile.run_requests import REQUESTS
from tests.model.family import graphs
from tests.runtime.neffs import ROOT, find_stand_ins
from tests.stand_ins import PLUGIN
from trnspec.bundle.manifest import Compiler, flag_tag
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.runtime import xla
from trnspec.runtime.xla import XlaRunner


def _run(*command: str, **more: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        find_stand_ins(patch, PLUGIN)
        environment = os.environ | more
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _expected(held: XlaRunner) -> list[list[int]]:
    return [r.ids for r in Engine(held, engine_config(held.bundle)).run(REQUESTS)]


@pytest.mark.slow
def test_two_ranks_emit_the_ids_of_the_cpu_with_caches_in_place(family: Path) -> None:
    held = graphs(family, "chain", tp=2)
    facts = _run("tests.runtime.run_plugin", "ids", str(held.bundle.path))
    assert facts["ids"] == _expected(held)
    assert facts["caches"][0] == facts["caches"][1] > 0
    assert facts["devices"] == ["cpu", 2]
    # of a bundle that has met no compiler: documented flags, and the LNC of a trn2
    assert facts["told"] == {
        "NEURON_CC_FLAGS": "--model-type transformer --auto-cast none -O2 --lnc 2",
        "NEURON_LOGICAL_NC_CONFIG": "2",
    }


@pytest.mark.slow
def test_a_graph_is_stored_by_one_process_and_loaded_by_another(family: Path, tmp_path: Path) -> None:
    held, file = graphs(family, "chain"), tmp_path / "executable"
    assert _run("tests.runtime.run_plugin", "store", str(held.bundle.path), str(file))["bytes"] > 1000
    facts = _run("tests.runtime.run_plugin", "load", str(held.bundle.path), str(file))
    assert facts["ids"] == _expected(held)
    assert facts["compiled"]
    assert not [name for name in facts["compiled"] if "prefill_k" in name]


def test_flags_and_lnc_of_a_bundle_reach_the_plugin(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tags that a manifest has; an environment's own flags stay, and a different LNC is refused."""
    plan = graphs(family, "chain").bundle.plan
    key = plan.graphs[0].key
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
    with pytest.raises(UserError, match="_NC_CONFIG is 2 and the bundle was compiled for 1; leave it out"):
        xla.set_lnc(compiler)
