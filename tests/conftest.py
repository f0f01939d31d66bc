"""Two CPU devices for every test process, configured before anything traces."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
import pytest
import torch

from nkisim import machine
from tests import executables, last_few
from tests.model.family import family

__all__ = ["family"]

# also if nkisim is on the path and not installed
pytest_plugins = ["nkisim.pytest_plugin", "pytester"]

jax.config.update("jax_num_cpu_devices", 2)
# exclude the objects of torch and JAX from collections
gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print versions that bits may depend on, also with `-q`, which has no header."""
    torch_set = torch.backends.cpu.get_cpu_capability()
    flags = os.environ.get("XLA_FLAGS", "no flags")
    facts = machine.facts() | {
        "torch": f"{torch.__version__} with {torch_set}",
        "XLA": f"{jaxlib.__version__}, {flags}",
    }
    terminalreporter.section("machine")
    for name, fact in facts.items():
        terminalreporter.write_line(f"{name}: {fact}")


# processor seconds of a test without the mark `slow`
_FAST_S = 5.0


def _processor_seconds() -> float:
    """Processor seconds of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test without the mark `slow` that takes longer than _FAST_S, in processor time."""
    begin = _processor_seconds()
    yield
    seconds = _processor_seconds() - begin
    if seconds > _FAST_S and not item.get_closest_marker("slow"):
        pytest.fail(f"took {seconds:.1f} s, the fast set allows {_FAST_S:.0f}; make it smaller or mark it slow")


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A graph is traced and compiled once in a session, for all workers."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        executables.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executables", patch)
        yield


@pytest.fixture(scope="session")
def demo_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo bundles, shared by the workers of a session."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _compiled_graphs_are_dropped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each has hundreds of memory maps; XLA aborts the process at the limit (vm.max_map_count)."""
    yield
    last_few.forget(request.module.__name__)
