"""`python -m bench.tune.first_token`: what is in the sum, and what is no whole chunk."""

from __future__ import annotations

import pytest

from bench.tune.first_token import first_token, main
from model.errors import UserError


def test_the_sum_of_a_short_prompt() -> None:
    one, two = first_token(128, 1), first_token(128, 2)
    parts = (one.products, one.attention, one.collectives, one.head_and_host)
    assert one.total == pytest.approx(sum(parts))
    assert min(parts) > 0
    assert one.bound < one.products + one.attention
    assert two.bound == pytest.approx(one.bound / 2)
    # 64 layers of 3.146 + 0.671 + 0.336 GFLOP at 78.6 TFLOP/s, and few scores
    assert one.bound == pytest.approx(64 * 4.153 / 78.6, rel=0.01)


@pytest.mark.parametrize("length", ["100", "3072"])
def test_no_whole_chunks(length: str) -> None:
    with pytest.raises(UserError, match=f"a prompt of {length} rows is no whole chunks"):
        main([length])
