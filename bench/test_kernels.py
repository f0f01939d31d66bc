"""`pytest bench --benchmark-only`: every case of `bench.kernels` with pytest-benchmark.

Each case is simulated once. `extra_info` has the kernel's simulated time, its band and its roofline share, and with the
vendor's `nki` the device's time. The seconds that pytest-benchmark prints are the simulator's on this machine.
`--benchmark-json FILE` writes all of it.
"""

from typing import Any

import pytest

from bench.kernels.__main__ import has_device, measure, simulate, simulate_elsewhere
from bench.kernels.case import Case
from bench.kernels.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.full_name)
def test_kernel(benchmark: Any, case: Case) -> None:
    device = has_device()
    row = benchmark.pedantic(simulate_elsewhere if device else simulate, args=(case,), rounds=1, iterations=1)
    numbers = {f"simulated_{name}": row[name] for name in ("us", "us_low", "us_high", "roofline_us")}
    numbers |= {"roofline_share": row["roofline_share"]} | ({"device_wall_us": measure(case)} if device else {})
    benchmark.extra_info.update(numbers)
    assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
