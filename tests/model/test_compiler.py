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
from model.serving import pjrt
from model.serving.compiler import Compiler
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.ended import check_end
from tests.model.family import graphs

# the other process compiles with the options of the released code
pytestmark = pytest.mark.released_code
_REQUEST = Request((5, 6, 7), Params(0.8, seed=3), 24)
_PARENT = """
import os
from model.serving.compiler import Compiler

with Compiler(1) as compiler:
    print(compiler._process.pid, flush=True)
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
        os.kill(compiler._process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=f"ended with status -9 at {graph.file}"):
            compiler.compile(bytes(bundle.read(graph.file)), graph)


def test_it_ends_with_the_process_that_has_started_it() -> None:
    ran = subprocess.run([sys.executable, "-c", _PARENT], capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL
    check_end(int(ran.stdout), 5)
