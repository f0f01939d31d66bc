"""Graphs that another process compiles: the same ids, its errors in this one, and no process that stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from tests.ended import check_end
from tests.model import demo_bundle
from tests.model.family import graphs
from trnspec.engine.engine import Engine
from trnspec.engine.ready import shape_of
from trnspec.engine.request import Params, Request
from trnspec.runtime import pjrt
from trnspec.runtime.compiler import Compiler
from trnspec.runtime.xla import Graphs

# the other process compiles with the options of the released code
pytestmark = pytest.mark.released_code
_REQUEST = Request((5, 6, 7), Params(0.8, seed=3), 24)
# ends while the other process, which has answered once, compiles for seconds
_PARENT = """
import os, sys, time
from pathlib import Path
from trnspec.bundle.opening import read_bundle
from model.errors import UserError
from trnspec.runtime.compiler import Compiler

bundle = read_bundle(Path(sys.argv[1]))
graph = max(bundle.graphs, key=lambda graph: len(bundle.read(graph.file)))
with Compiler(1) as compiler:
    try:
        compiler.compile(b"no proto", graph)
    except UserError:
        print(compiler._child.process.pid, flush=True)
    compiler._child.pipe.send((bytes(bundle.read(graph.file)), graph))
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
"""


def test_it_compiles_all_and_this_process_none(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = graphs(family, max_len=256)
    (expected,) = Engine(usual, shape_of(usual.bundle)).run([_REQUEST])

    def compiled_here(*_: Any) -> None:
        raise AssertionError("this process compiles")

    monkeypatch.setattr(pjrt, "compile_hlo", compiled_here)
    apart = Graphs(usual.bundle)
    with apart.compiled_apart():
        (result,) = Engine(apart, shape_of(apart.bundle)).run([_REQUEST])
    assert result.ids == expected.ids
    with pytest.raises(AssertionError, match="this process compiles"):
        apart.prepare(next(key for key in apart.bundle.plan.by_key if key not in apart._executables))


def test_its_errors_are_sentences(family: Path) -> None:
    bundle = graphs(family, max_len=256).bundle
    graph = bundle.graphs[0]
    with Compiler(1) as compiler:
        with pytest.raises(UserError, match=f"{graph.file} cannot be compiled .*; build the bundle again"):
            compiler.compile(b"no proto", graph)
        # it goes on
        with pytest.raises(UserError, match="cannot be compiled"):
            compiler.compile(b"no proto", graph)
        os.kill(compiler._child.process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=f"compiles {graph.file} was ended by signal 9"):
            compiler.compile(bytes(bundle.read(graph.file)), graph)


def test_it_ends_with_the_process_that_has_started_it(base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(demo_bundle.graphs(base).bundle.path)]
    # not a pipe, whose end both processes would hold
    with (tmp_path / "said").open("w") as said:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=said, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, (tmp_path / "said").read_text()
    check_end(int(ran.stdout), 1)
