"""A graph for which this process has no memory maps left is refused in a sentence; XLA would end the process."""

import mmap
from pathlib import Path

import pytest

from model.errors import UserError
from tests.model.family import graphs
from trnspec.engine.engine import Engine
from trnspec.engine.ready import shape_of
from trnspec.engine.request import Request
from trnspec.runtime import memory_maps
from trnspec.runtime.xla import Graphs


def test_a_map_is_counted() -> None:
    before = memory_maps.used()
    # pages that are shared are never joined with their neighbours
    with mmap.mmap(-1, mmap.PAGESIZE):
        assert memory_maps.used() == before + 1 < memory_maps.limit()


def test_a_graph_without_room_is_refused(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Graphs(graphs(family).bundle)
    request = Request((5, 6), max_new_tokens=2)
    limit = tmp_path / "max_map_count"
    limit.write_text(f"{memory_maps.used() + 100}\n")
    with monkeypatch.context() as few:
        few.setattr(memory_maps, "_LIMIT", limit)
        with pytest.raises(UserError, match=r"has \d+ memory maps of the \d+ that Linux allows it"):
            Engine(compiled, shape_of(compiled.bundle)).run([request])
    assert len(Engine(compiled, shape_of(compiled.bundle)).run([request])[0].ids) == 2
