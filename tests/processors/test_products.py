"""The bits of a row of a product do not depend on the number of rows: as the runtime sets it up on this processor."""

from __future__ import annotations

import pytest

from tests.processors.environments import UNFORCED, Environment, product_environments, results


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    assert results(UNFORCED, "products") == {"others": []}


@pytest.mark.parametrize("environment", product_environments(), ids=str)
def test_why_processors_without_avx_512_are_held_to_sse(environment: Environment) -> None:
    """AVX2 is what they would take by themselves: the last one to three of six rows are summed in another order."""
    if environment.why_not:
        pytest.skip(environment.why_not)
    others = results(environment, "products")["others"]
    assert {n % 6 for n in others} == ({1, 2, 3} if environment.name == "oneDNN-AVX2" else set())
