"""`pytest bench/kernels/benchmarks.py`: the cases of bench.kernels under pytest-benchmark.

Without a device the measured time is the simulator's own; the kernel's simulated time is in `extra_info`.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.kernels import __main__ as kernels
from bench.kernels.case import Case
from bench.kernels.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.full_name)
def test_case(benchmark: Any, case: Case) -> None:
    """Simulate a case once, or launch it on the device as often as pytest-benchmark asks."""
    if kernels.has_device():
        arguments = case.arguments()
        benchmark(lambda: case.kernel[case.lnc](*arguments))
        return
    benchmark.extra_info.update(benchmark.pedantic(kernels.simulate, args=(case,), rounds=1))
