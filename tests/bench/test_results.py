"""Every file of bench/results has a header, is cited by a page, and is written by a target of the Makefile."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.provenance import HEADER, header, write_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "bench/results").iterdir())
PAGES = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_has_a_header_a_page_and_a_target(file: Path) -> None:
    assert file.suffix in (".json", ".md"), "a picture would have to carry the digest of its data"
    if file.suffix == ".json":
        result = json.loads(file.read_text(encoding="utf-8"))
        assert set(HEADER) <= set(result)
        assert result["source"] in ("simulated", "wall")
    else:
        assert re.search(r"^source simulated, commit \w+, .*, \d{4}-\d\d-\d\dT", file.read_text(encoding="utf-8"), re.M)
    assert f"bench/results/{file.name}" in PAGES
    assert f"--out bench/results/{file.name}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_results_are_small_json_by_line(tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in RESULTS) <= 80_000
    rows = [{"a": 1}, {"a": 2}]
    write_result(tmp_path / "x.json", header("wall") | {"rows": rows})
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == rows
    assert len((tmp_path / "x.json").read_text().splitlines()) > len(rows)
