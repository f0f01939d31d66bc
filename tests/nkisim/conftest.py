"""`--witness`: where the vendor's nki is installed, every kernel of these tests runs on both simulators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nkisim import witness

# the modules whose kernels do not depend on this simulator's own policies
WITNESSED = ("laws.test_instructions", "laws.test_manual_examples", "properties.")


@pytest.fixture(autouse=True, scope="module")
def _witness(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.module.__name__.removeprefix("tests.nkisim.")
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
