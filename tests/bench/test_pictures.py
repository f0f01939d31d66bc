"""The committed pictures are what the command draws."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.pictures.__main__ import FOLDER, PICTURES, main

DIAGRAMS = ("loop.svg", "bundle.svg", "floors.svg")


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_the_committed_one(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PICTURES[name]()


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_committed_picture_is_well_formed(name: str) -> None:
    root = ET.parse(FOLDER / name).getroot()
    assert root.tag.endswith("svg")
    assert len(list(root)) > 10


def test_one_picture_can_be_written_alone(tmp_path: Path) -> None:
    main(["--only", "loop.svg", "--out", str(tmp_path)])
    assert [p.name for p in tmp_path.iterdir()] == ["loop.svg"]
