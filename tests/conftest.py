"""Two CPU devices for every test process, made before anything traces."""

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

# the plugin also where nkisim is on the path and not installed
pytest_plugins = ["nkisim.pytest_plugin", "pytester"]

jax.config.update("jax_num_cpu_devices", 2)
# a collection would look at every object of torch and JAX again
gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what bits may depend on; `-q` prints no header, so that it comes before the list of failures."""
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
    """Those of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes longer than the fast set allows and is not marked slow.

    Processor time is what the test itself needs; wall time on a busy machine is that of others too.
    """
    begin = _processor_seconds()
    yield
    seconds = _processor_seconds() - begin
    if seconds > _FAST_S and not item.get_closest_marker("slow"):
        pytest.fail(f"took {seconds:.1f} s, the fast set allows {_FAST_S:.0f}; make it smaller or mark it slow")


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JAX traces and XLA compiles a graph once in a session, whichever worker needs it."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        executables.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executables", patch)
        yield


@pytest.fixture(scope="session")
def demo_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo pair's bundles, one for all workers of the session."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _compiled_graphs_are_dropped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each holds hundreds of memory maps, and XLA ends the process at the limit (vm.max_map_count)."""
    yield
    last_few.forget(request.module.__name__)
