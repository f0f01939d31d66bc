"""`--witness`: where the vendor's nki is installed, every kernel of these tests runs on both simulators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nkisim import machine
from validation import stand_in, witness

# the plugin also where nkisim is on the path and not installed
pytest_plugins = ["nkisim.pytest_plugin", "pytester"]

# the modules whose kernels do not depend on this simulator's policies
WITNESSED = ("laws.test_instructions", "laws.test_manual_examples", "properties.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness", action="store_true", help="run these kernels on the vendor's nki too")
    parser.addoption("--witness-stand-in", action="store_true", help="with --witness: on nkisim in the vendor's place")
    parser.addoption("--witness-page", type=Path, metavar="FILE", help="with --witness: write the result to this page")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page of the witness."""
    if (page := session.config.getoption("--witness-page")) and witness.SEEN:
        package = None if session.config.getoption("--witness-stand-in") else witness.vendor()
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        page.write_text(text.partition(witness.RESULT)[0] + witness.result(package), encoding="utf-8")


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
    package = stand_in.package() if request.config.getoption("--witness-stand-in") else witness.vendor()
    if package is None:
        pytest.skip(witness.ABSENT)
    witness.ACTIVE.append(witness.Witness(package))
    yield
    seen = witness.ACTIVE.pop()
    witness.SEEN.append(seen)
    print(f"\n{name}: {seen.exact} outputs equal bit for bit, {seen.within} within the gap {seen.largest}")
