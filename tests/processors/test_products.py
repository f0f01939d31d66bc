"""The bits of a row of a product do not depend on the number of rows: as the runtime sets it up on this processor."""

from __future__ import annotations

import pytest

from tests.processors.environments import UNFORCED, Environment, held_back, product_environment, results


@pytest.mark.parametrize("environment", [UNFORCED, held_back()], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(environment: Environment) -> None:
    """As the runtime sets it up here, and on a processor without AVX-512."""
    if environment.why_not:
        pytest.skip(environment.why_not)
    assert results(environment, "products") == {"others": []}


def test_why_a_processor_without_avx_512_is_held_back() -> None:
    """By itself oneDNN sums the last one to three of rows by six in another order."""
    environment = product_environment()
    if environment.why_not:
        pytest.skip(environment.why_not)
    assert {n % 6 for n in results(environment, "products")["others"]} == {1, 2, 3}
