"""bench.fp8 prints the quality of each build, that of fp32 first."""

from __future__ import annotations

import pytest

from bench import fp8


@pytest.mark.slow
def test_errors_grow_with_fewer_bits(capsys: pytest.CaptureFixture[str]) -> None:
    fp8.main([])
    lines = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("| fp32", "| bf16", "| FP8")))
    names, errors, agree, *_ = zip(*(line.strip("| ").split(" | ") for line in lines), strict=True)
    assert names == ("fp32", "bf16", "FP8")
    fp32_error, bf16_error, fp8_error = (float(error.rstrip("%")) for error in errors)
    assert 0 == fp32_error < bf16_error < fp8_error < 5
    assert agree[0] == "100.0%"
