"""`--witness`: where the vendor's nki is installed, every kernel of these tests runs on both simulators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import witness
from nkisim import machine

# the plugin also where nkisim is on the path and not installed
pytest_plugins = ["nkisim.pytest_plugin", "pytester"]

# the modules whose kernels do not depend on this simulator's policies
WITNESSED = ("laws.test_instructions", "laws.test_manual_examples", "properties.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness", action="store_true", help="run these kernels on the vendor's nki too")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the processor and the libraries."""
    terminalreporter.section("machine")
    for name, fact in machine.facts().items():
        terminalreporter.write_line(f"{name}: {fact}")


@pytest.fixture(autouse=True, scope="module")
def _witness(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.module.__name__
    if not request.config.getoption("--witness") or not name.startswith(WITNESSED):
        yield
        return
    package = witness.vendor()
    if package is None:
        pytest.skip(witness.ABSENT)
    witness.ACTIVE.append(witness.Witness(package))
    yield
    seen = witness.ACTIVE.pop()
    print(f"\n{name}: {seen.exact} outputs equal bit for bit, {seen.within} within the gap {seen.largest}")
