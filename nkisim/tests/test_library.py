"""The vendor's rows: the command runs a checkout's kernels and lists refusals; a few rows hold without the library."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nkisim.timeline.trn2 import TRN2
from validation import __main__ as command
from validation import provenance
from validation.library import Library, recordings, rows

nisa: Any = import_module("nkisim.isa")
nl: Any = import_module("nkisim.language")
GIVEN = {row.id: row for row in rows()}

SOURCE = """
import enum
import nki
import nki.isa as nisa
import nki.language as nl

class Kind(enum.Enum):
    PLAIN = 0

@nki.jit
def copied(x, kind, bad=False):
    assert kind is Kind.PLAIN and not bad, "not this one"
    loaded = nl.load(x)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=loaded)
    return out
"""


def written(folder: Path, *arguments: dict[str, Any]) -> tuple[Path, Path]:
    """A checkout with one kernel, and rows that call it."""
    package = folder / "src" / "nkilib_src" / "nkilib"
    package.mkdir(parents=True)
    (package / "copies_of_a_test.py").write_text(SOURCE)
    listed = [
        {"id": f"copied[{i}]", "kernel": "copied" if a else "absent", "tensors": {"x": [[128, 64], "float32"]},
         "arguments": a, "lnc": 1, "lnc_from": "test", "measured_us": 16.0, "source": "a test"}
        for i, a in enumerate(arguments)
    ]  # fmt: skip
    (folder / "rows.json").write_text(json.dumps({"rows": listed}))
    return folder, folder / "rows.json"


def test_a_checkout_is_run_and_what_is_refused_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, file = written(tmp_path, {"kind": "@Kind.PLAIN"}, {"kind": "@Kind.PLAIN", "bad": True}, {})
    good, bad, absent = recordings(checkout, rows(file))
    assert good.policy == "default"
    assert good.events is not None
    assert {e.engine for e in good.events} == {"dma"}
    assert "not this one" in bad.refused
    assert "absent" in absent.refused
    command.main(["--library", str(checkout), "--rows", str(file)])
    caught = capsys.readouterr().out
    assert "1 of 3 rows run: 1 by the default policy" in caught
    assert all(f"* `copied[{i}]`: " in caught for i in (1, 2))


def test_calls_without_a_measurement_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, file = written(tmp_path, {"kind": "@Kind.PLAIN"})
    file.write_text(file.read_text().replace('"measured_us": 16.0, ', ""))
    command.main(["--library", str(checkout), "--rows", str(file)])
    assert re.search(r"^\| copied\[0\] \| \d+\.\d \|$", capsys.readouterr().out, re.MULTILINE)


def test_no_checkout_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no nkilib"):
        Library(tmp_path)
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no measured rows"):
        rows(tmp_path / "rows.json")


def test_the_section_of_constants_is_current(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "time.md").read_text(encoding="utf-8")
    assert page.endswith(provenance.section())
    copy = tmp_path / "page.md"
    copy.write_text(page.replace("`tensor_ghz` | 2.4", "`tensor_ghz` | 2.5"), encoding="utf-8")
    assert provenance.main(["--out", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == page
    assert set(provenance.FITTED) <= set(TRN2.constants())


def test_the_refused_rows_are_those_of_the_page() -> None:
    page = (Path(command.__file__).parent / "library.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\* `([^`]+)`: ", page, re.MULTILINE)) == provenance.REFUSED
    assert f"{len(GIVEN) - len(provenance.REFUSED)} of {len(GIVEN)} rows run" in page


def test_the_committed_page_meets_the_aims() -> None:
    text = (Path(command.__file__).parent / "library.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("| all |"))
    _, _, count, error, likely, width, possible, _, pairs, _ = (cell.strip() for cell in line.split("|"))
    assert int(count) >= 61
    assert float(error.rstrip("%")) <= 10
    assert int(likely) / int(count) >= 0.9
    assert float(width.rstrip("%")) <= 25
    assert int(possible) >= int(likely)
    right, decided = map(int, pairs.split(" of "))
    assert right / decided >= 0.95
