"""The bits of a row of a product do not depend on the number of rows: as the runtime sets it up on this processor."""

from __future__ import annotations

import pytest

from tests.processors.environments import UNFORCED, Environment, held_back, product_environment, results


def _others(environment: Environment, way: str) -> set[int]:
    if environment.why_not:
        pytest.skip(environment.why_not)
    return set(results(environment, "products", way)["others"])


@pytest.mark.parametrize("environment", [UNFORCED, held_back()], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(environment: Environment) -> None:
    """As the runtime sets it up here, and on a processor without AVX-512."""
    assert not _others(environment, "runtime")


def test_why_onednn_does_not_multiply_on_a_processor_without_avx_512() -> None:
    """By itself it sums the last one to three of rows by six in another order."""
    assert {n % 6 for n in _others(product_environment(), "oneDNN") if n <= 48} == {1, 2, 3}


def test_why_ynnpack_takes_weights_as_a_checkpoint_has_them() -> None:
    """By columns it cuts the sums of a few rows, and not those of many."""
    others = _others(product_environment(), "by columns")
    assert min(others) > 32
    assert others >= {61, 128, 140}
