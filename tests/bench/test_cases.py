"""Every case of bench.kernels runs under the simulator's strict laws: fits, no race, no unwritten read."""

from __future__ import annotations

import pytest

from bench.kernels.__main__ import simulate
from bench.kernels.case import Case
from bench.kernels.cases import CASES
from bench.kernels.layer import MANY_LAYERS
from nkisim.timeline.trn2 import TRN2

KIB = 1024


# more layers run the instructions of two again
@pytest.mark.parametrize(
    "case",
    [
        # a long prompt's products are simulated in ten seconds, those of all 8B on one rank in five
        pytest.param(case, marks=pytest.mark.slow)
        if "prompt_mlp" in case.full_name and ("C2048" in case.name or "8B-tp1" in case.name)
        else case
        for case in CASES
        if case not in MANY_LAYERS
    ],
    ids=lambda case: case.full_name,
)
def test_runs_and_fits(case: Case) -> None:
    row, geometry = simulate(case), TRN2.geometry
    peaks = row["peak_bytes_per_partition"]
    assert 0 < peaks["sbuf"] <= geometry.sbuf_bytes_per_partition == 224 * KIB
    assert peaks["psum"] <= geometry.psum_banks * geometry.psum_bank_bytes == 16 * KIB
    assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
    # at least what the work needs moves, at most as much again and the small operands; a prompt's 512 rows at a time
    # read the weights anew, and of an MLP whose inner rows fill SBUF each 128 (8B on one rank) or 256 of the 2048
    name = case.full_name
    long_rows = {"prompt_mlp_kernel/8B-tp1-C2048": 16, "prompt_mlp_kernel/32B-tp4-C2048": 9}
    times = long_rows.get(name.removesuffix("-lnc2"), 4 if name.startswith("prompt_") else 2)
    assert row["hbm_bytes"] <= row["moved_bytes"] <= times * row["hbm_bytes"] + 64 * KIB
    assert 0 < row["roofline_share"] < 1
