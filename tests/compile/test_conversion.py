"""HLO made beside the trace, by another process: the same bytes, an end with the build, a sentence if it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile.build import peak_bytes
from compile.graph.conversion import Converter
from compile.graph.trace import lower_graph, lower_graphs
from model.errors import UserError
from tests.compile.tiny import spec
from tests.ended import check_end, runs
from trnspec.bundle.plan import make_plan

_LONG_S = 30


def test_the_bytes_are_those_of_one_process(base: Path) -> None:
    plan = make_plan(spec(base, tp=2).bundle)
    graphs = plan.graphs[::4]
    assert len(graphs) > 2
    assert list(lower_graphs(plan.spec, graphs)) == [lower_graph(plan.spec, graph) for graph in graphs]
    assert list(lower_graphs(plan.spec, ())) == []


def test_a_build_that_fails_leaves_no_process(base: Path) -> None:
    plan = make_plan(spec(base).bundle)
    before = _children()
    protos = lower_graphs(plan.spec, plan.graphs)
    next(protos)
    (process,) = _children() - before
    protos.close()
    assert not runs(process)


def test_its_memory_is_the_build_s_too() -> None:
    alone = peak_bytes()
    with Converter() as converter:
        _fails(converter, b"no module")
        ended = peak_bytes()
    with Converter():
        time.sleep(0.5)
        assert peak_bytes() - alone > 20e6
    assert ended - alone < 20e6


@pytest.mark.parametrize(("module", "status"), [(b"no module", 1), (b"", 1)], ids=["no module", "nothing"])
def test_a_module_that_is_not_converted(module: bytes, status: int) -> None:
    with Converter() as converter:
        assert f"ended with status {status}; " in _fails(converter, module)
        # nor is one behind it
        assert f"ended with status {status}; " in _fails(converter, module)


def test_a_process_that_is_killed() -> None:
    before = _children()
    with Converter() as converter:
        (process,) = _children() - before
        os.kill(process, 9)
        assert "the process that makes HLO ended with status -9; " in _fails(converter, b"no module")


def test_it_ends_with_a_build_that_is_killed() -> None:
    program = (
        "import os, signal\n"
        "from compile.graph.conversion import Converter\n"
        "with Converter() as converter:\n"
        "    print(converter._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert killed.returncode == -9
    check_end(int(killed.stdout), _LONG_S)


def _fails(converter: Converter, module: bytes) -> str:
    with pytest.raises(UserError) as refused:
        converter.convert(module).result(_LONG_S)
    return str(refused.value)


def _children() -> set[int]:
    files = Path("/proc/self/task").glob("*/children")
    return {int(process) for file in files for process in file.read_text(encoding="utf-8").split()}
