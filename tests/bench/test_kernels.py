"""`python -m bench.kernels`: every case runs and fits; rows, table, selection, and the path of a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.kernels import __main__ as kernels
from bench.kernels.case import Case
from bench.kernels.cases import CASES
from bench.kernels.explain import prompt_bound_ns, sums_ns
from bench.kernels.layer import MANY_LAYERS
from model.errors import UserError
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.trn2 import TRN2

SMALL = "accept_drafts_kernel/M32-B4-N8"
BY_NAME = {case.full_name: case for case in CASES}
KIB = 1024


# more layers repeat the instructions of two
@pytest.mark.parametrize(
    "case",
    [
        # prefill products with many rows take ten seconds, those of the 8B at tp 1 and layers of the 32B at tp 4 five
        pytest.param(case, marks=pytest.mark.slow)
        if ("prompt_mlp" in case.full_name and ("C2048" in case.name or "8B-tp1" in case.name))
        or "decode_layers_kernel/32B-tp4" in case.full_name
        else case
        for case in CASES
        if case not in MANY_LAYERS
    ],
    ids=lambda case: case.full_name,
)
def test_runs_and_fits(case: Case) -> None:
    row, geometry = kernels.simulate(case), TRN2.geometry
    peaks = row["peak_bytes_per_partition"]
    assert 0 < peaks["sbuf"] <= geometry.sbuf_bytes_per_partition == 224 * KIB
    assert peaks["psum"] <= geometry.psum_banks * geometry.psum_bank_bytes == 16 * KIB
    assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
    # moved bytes: the roofline's, up to twice that, and small operands; prefill reads the weights once per 512 rows, an
    # MLP whose intermediate rows fill SBUF once per 128 (8B on one rank) or 256 of 2048 rows
    name = case.full_name
    long_rows = {"prompt_mlp_kernel/8B-tp1-C2048": 16, "prompt_mlp_kernel/32B-tp4-C2048": 9}
    times = long_rows.get(name.removesuffix("-lnc2").removesuffix("-fp8"), 4 if name.startswith("prompt_") else 2)
    assert row["hbm_bytes"] <= row["moved_bytes"] <= times * row["hbm_bytes"] + 64 * KIB
    assert 0 < row["roofline_share"] < 1


def test_a_json_row_names_the_source_of_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--json", "--only", SMALL])
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["source"] == "simulated"
    # values and ids of 32 shards, drafts, limits
    assert row["hbm_bytes"] == 2 * 32 * 4 * 8 * 4 + 4 * 7 * 4 + 4 * 4
    assert row["hbm_bytes"] <= row["moved_bytes"] < 1.05 * row["hbm_bytes"]
    assert row["roofline_us"] == pytest.approx(row["roofline_share"] * row["us"])


@pytest.mark.parametrize("words", ["--only nothing", "--explain", "--picture {}/x"])
def test_a_wrong_selection_is_one_sentence(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--explain and --picture need one case, --only at least one; names are unique."""
    with pytest.raises(UserError, match="no case contains 'nothing'" if "nothing" in words else "take one case"):
        kernels.main(words.format(tmp_path).split())
    kernels.main(["--list", "--only", SMALL])
    assert capsys.readouterr().out == f"{SMALL}\n"
    assert len(BY_NAME) == len(CASES)


def test_attention_reads_the_cache_once() -> None:
    """The rest of what it moves are the rows."""
    row = kernels.simulate(BY_NAME["verify_attention_kernel/B4-H2-G1-S1024-N8-D128-bf16"])
    assert row["hbm_bytes"] < row["moved_bytes"] < 1.06 * row["hbm_bytes"]


def test_the_table_names_the_simulation_and_a_device_adds_its_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the vendor's nki in the process, the simulated column comes from another process."""
    kernels.main(["--only", SMALL])
    out = capsys.readouterr().out
    assert ("us (simulated, without a launch)" in out, "wall" in out) == (True, False)
    monkeypatch.setattr(kernels, "measure", lambda case: 12.5)
    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    assert kernels.has_device()
    kernels.main(["--only", SMALL])
    out = capsys.readouterr().out
    assert "us (wall, device)" in out
    assert "12.50" in out
    assert "| 6." in out or "| 7." in out


def test_the_parts_of_a_critical_path_add_up_to_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--explain", "--only", SMALL])
    lines = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    *stages, total = map(float, lines[1:])
    assert len(stages) > 3
    assert sum(stages) == pytest.approx(total, abs=0.01 * len(stages))
    assert total == pytest.approx(kernels.simulate(BY_NAME[SMALL])["us"], abs=0.01)


def test_the_lower_bound_of_prompt_attention() -> None:
    case = BY_NAME["prompt_attention_kernel/C128-S8192-H2-G1-D128-bf16"]
    assert case.dims
    assert prompt_bound_ns(case.dims, cores=2) == prompt_bound_ns(case.dims) / 2
    share = case.cost().flops / 78.6e3 / prompt_bound_ns(case.dims)
    assert share == pytest.approx(0.80, abs=0.005)
    assert prompt_bound_ns(case.dims) < 1e3 * kernels.simulate(case)["us"]


def test_the_lower_bound_of_all_reduces() -> None:
    """Two collectives per layer, one after the other, and the barriers of two cores."""
    cases = [BY_NAME[f"decode_layers_kernel/1.7B-tp32-B4-N1-S1024-L4{lnc}"] for lnc in ("", "-lnc2")]
    one, two = (sums_ns(case.recorded().events) for case in cases)
    assert 8 * collective_ns(0, 32, 1, TRN2.at("nominal")) < one < two - 8 * 4100
    assert all(bound < 1e3 * kernels.simulate(case)["us"] for bound, case in zip((one, two), cases, strict=True))
