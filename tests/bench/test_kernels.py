"""`python -m bench.kernels`: rows, table, selection, and the seam to a device."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from bench.kernels import __main__ as kernels
from bench.kernels.cases import CASES
from bench.kernels.explain import best_share, bound_ns, prompt_bound_ns, sums_ns
from bench.kernels.layer import MANY_LAYERS
from model.errors import UserError
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.trn2 import TRN2

SMALL = "accept_drafts_kernel/M32-B4-N8"


def test_names_are_unique() -> None:
    names = [case.full_name for case in CASES]
    assert len(set(names)) == len(names)


def test_a_json_row_says_where_its_number_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--json", "--only", SMALL])
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["source"] == "simulated"
    assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
    # values and ids of 32 shards, drafts, limits
    assert row["hbm_bytes"] == 2 * 32 * 4 * 8 * 4 + 4 * 7 * 4 + 4 * 4
    assert row["hbm_bytes"] <= row["moved_bytes"] < 1.05 * row["hbm_bytes"]
    assert row["roofline_us"] == pytest.approx(row["roofline_share"] * row["us"])
    assert 0 < row["peak_bytes_per_partition"]["sbuf"] < 224 * 1024


def test_the_table_names_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--only", SMALL])
    out = capsys.readouterr().out
    assert "us (simulated)" in out
    assert "wall" not in out


def test_a_wrong_selection_is_one_sentence() -> None:
    with pytest.raises(UserError, match="no case contains 'nothing'"):
        kernels.main(["--only", "nothing"])


def test_no_bigger_transfer_than_the_law_says_but_the_rows() -> None:
    """The attention kernel reads the cache once: what it moves beyond that are the rows."""
    case = next(c for c in CASES if "S1024-N8-D128-bf16" in c.name and "B4-H2" in c.name and c.lnc == 1)
    row = kernels.simulate(case)
    assert row["hbm_bytes"] < row["moved_bytes"] < 1.06 * row["hbm_bytes"]


def test_a_device_puts_both_columns_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a vendor's nki in the process, the simulated column comes from another one."""
    monkeypatch.setattr(kernels, "measure", lambda case: 12.5)
    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    assert kernels.has_device()
    kernels.main(["--only", SMALL])
    out = capsys.readouterr().out
    assert "us (wall, device)" in out
    assert "12.50" in out
    assert "| 6." in out or "| 7." in out


def test_the_parts_of_a_critical_path_are_the_whole_time(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--explain", "--only", SMALL])
    *stages, whole = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(stages) > 3
    assert sum(map(float, stages)) == pytest.approx(float(whole), abs=0.01 * len(stages))
    (case,) = [case for case in CASES if case.full_name.startswith(SMALL)]
    assert float(whole) == pytest.approx(kernels.simulate(case)["us"], abs=0.01)


@pytest.mark.parametrize(("slots", "low", "high"), [(1024, 0.58, 0.59), (8192, 0.91, 0.92)])
def test_no_order_beats_the_bound_of_attention(slots: int, low: float, high: float) -> None:
    """At 1024 slots the values' path alone leaves less than 60 % of the roofline; at 8192 it leaves most."""
    name = f"verify_attention_kernel/B4-H2-G1-S{slots}-N8-D128-bf16"
    one, two = (next(c for c in CASES if c.full_name == name + end) for end in ("", "-lnc2"))
    assert one.dims
    assert low < best_share(one.dims) < high
    # at 1024 slots most of the time is the latency of the gathers of blocks
    assert bound_ns(one.dims) < 1e3 * kernels.simulate(one)["us"] < (3 if slots == 1024 else 1.5) * bound_ns(one.dims)
    assert bound_ns(one.dims) / 2 < bound_ns(one.dims, cores=2) < 1e3 * kernels.simulate(two)["us"]


def test_no_order_beats_the_bound_of_prompts() -> None:
    case = next(c for c in CASES if c.full_name == "prompt_attention_kernel/C128-S8192-H2-G1-D128-bf16")
    assert case.dims
    assert prompt_bound_ns(case.dims, cores=2) == prompt_bound_ns(case.dims) / 2
    share = case.cost().flops / 78.6e3 / prompt_bound_ns(case.dims)
    assert share == pytest.approx(0.80, abs=0.005)
    assert prompt_bound_ns(case.dims) < 1e3 * kernels.simulate(case)["us"]


def test_no_schedule_beats_the_sums_over_ranks() -> None:
    """Two collectives a layer, each behind the one before, and the joins of two cores."""
    one, two = (
        next(c for c in MANY_LAYERS if c.name.startswith("1.7B") and "-L4" in c.name and c.lnc == n) for n in (1, 2)
    )
    bounds = {case.lnc: sums_ns(case.recorded().events) for case in (one, two)}
    assert 8 * collective_ns(0, 32, 1, TRN2.at("nominal")) < bounds[1] < bounds[2] - 8 * 4100
    assert bounds[1] < 1e3 * kernels.simulate(one)["us"]
    assert bounds[2] < 1e3 * kernels.simulate(two)["us"]


@pytest.mark.parametrize("flags", [["--explain"], ["--recording", "x"], ["--picture", "x"]])
def test_one_case_is_explained_recorded_or_drawn(flags: list[str]) -> None:
    with pytest.raises(UserError, match="take one case"):
        kernels.main(flags)
