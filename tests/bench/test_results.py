"""Every file of bench/results has a header, is cited by a page, and is written by a target of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.provenance import HEADER, read_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "bench/results").iterdir())
PAGES = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_has_a_header_a_page_and_a_target(file: Path) -> None:
    if file.suffix == ".json":
        assert read_result(file)["source"] in ("simulated", "wall")
    else:
        # a picture would have to name the digest of its data: there is none
        assert file.suffix == ".md"
        (line,) = re.findall(r"^source .*", file.read_text(encoding="utf-8"), re.M)
        assert all(name in line for name in HEADER[:2])
    assert f"bench/results/{file.name}" in PAGES
    assert f"--out bench/results/{file.name}" in MAKEFILE


def test_results_are_small() -> None:
    assert sum(file.stat().st_size for file in RESULTS) <= 80_000
