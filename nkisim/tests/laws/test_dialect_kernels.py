"""The linter on complete kernels: ordinary ones pass, callees in other modules are walked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nkisim.lint import lint, main

ORDINARY = """
import math
from dataclasses import dataclass
from enum import Enum
from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from .tiles import TiledRange, View, ceil_div

P_MAX = 128
TABLE = {key: value for key, value in ((1, 2), (3, 4))}

class Mode(Enum):
    FAST = 0

@dataclass
class Config(nl.NKIObject):
    rows: int
    mode: Mode = Mode.FAST
    def tiles(self) -> int:
        return ceil_div(self.rows, P_MAX)
    def host_only(self):
        with open("cache") as file:
            return [line for line in file]

@nki.jit
def scale(x: nl.NkiTensor, gain: float = 1.0, axis: int = -1, bias: Optional[nl.ndarray] = None):
    rows, columns = x.shape
    config = Config(rows)
    assert 0 < rows <= 2**14, f"got {rows=} for {x.dtype}"
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    loaded = []
    for tile in TiledRange(rows, P_MAX):
        sb = nl.ndarray((P_MAX, columns), dtype=x.dtype, buffer=nl.sbuf, name=f"tile_{tile.index}")
        nisa.dma_copy(dst=sb[0 : tile.size, :], src=x[tile.start : tile.start + tile.size, nl.ds(0, columns)])
        loaded.append(sb)
    for i in range(len(loaded)):
        engine = nisa.engine.vector if i % 2 == 0 else nisa.engine.gpsimd
        nisa.tensor_scalar(loaded[i], loaded[i], nl.multiply, gain / math.sqrt(columns), engine=engine)
        if bias != None and config.mode == Mode.FAST:
            view = View(loaded[i]).slice(dim=1, start=0, end=columns).get_view()
            nisa.tensor_tensor(dst=view, data1=view, data2=bias, op=nl.add)
        if config.mode in (Mode.FAST,) and not i >= config.tiles():
            nisa.dma_copy(dst=out[i * P_MAX : (i + 1) * P_MAX, :], src=loaded[i])
    nisa.memset(loaded[0], value=-np.inf)
    return out
"""
TILES = """
import math
from nki.language import NKIObject

class Tile(NKIObject):
    def __init__(self, size: int, index: int, start: int):
        self.size = size
        self.index = index
        self.start = start

def ceil_div(n, d):
    return (n + d - 1) // d

def TiledRange(size, tile_size: int):
    tiles = []
    for i in range(math.ceil(size / tile_size)):
        tiles.append(Tile(min(tile_size, size - i * tile_size), i, i * tile_size))
    return tuple(tiles)

class View(NKIObject):
    def __init__(self, base):
        self.base, shape = base, tuple(base.shape)
        self.shape = shape
    @staticmethod
    def strides(shape):
        return shape
    def slice(self, dim: int, start: int, end: int):
        return self
    def get_view(self):
        return self.base.ap(pattern=View.strides(self.shape))

def host_report(*names, **options):
    return sorted({n for n in names})
"""


def package(tmp_path: Path, kernel: str = ORDINARY, tiles: str = TILES) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "scale.py").write_text(kernel)
    (folder / "tiles.py").write_text(tiles)
    return folder


def test_ordinary_kernel_and_its_callees_pass(tmp_path: Path) -> None:
    # unpacking into an attribute is a law of its own; see the next test
    tiles = TILES.replace("self.base, shape = base, tuple(base.shape)", "self.base = base\n        shape = 1")
    result, count = lint([package(tmp_path, tiles=tiles)])
    assert ([str(f) for f in result], count) == ([], 1)


def test_fault_in_a_method_of_another_module(tmp_path: Path) -> None:
    result, _ = lint([package(tmp_path) / "scale.py"])
    assert [(Path(f.path).name, f.rule, f.kernel) for f in result] == [("tiles.py", "unpack-target", "scale")]


@pytest.mark.parametrize(
    "call", ["helper.f(a)", "f(a)", "g(a)", "nl.fori_loop(0, 3, f)"], ids=["module", "name", "package", "value"]
)
def test_callees_are_followed(call: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def f(x):\n    return [i for i in x]\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text("from .deep import g\n")
    (tmp_path / "sub" / "deep.py").write_text("def g(x):\n    return [i for i in x]\n")
    (tmp_path / "k.py").write_text(
        "import nki\nimport nki.language as nl\nimport helper\nfrom helper import f\n"
        f"from sub import g\n@nki.jit\ndef k(a):\n    {call}\n"
    )
    result, _ = lint([tmp_path / "k.py"])
    assert "comprehension" in {f.rule for f in result}


def test_every_way_to_make_a_kernel_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text(
        "import nki\nfrom nki import jit\ndef one(a):\n    return a is True\nk1 = nki.jit(one)\n"
        "@jit\ndef two(a):\n    return a is True\n"
        "def make():\n    @nki.jit\n    def three(a):\n        return a is True\n    return three\n"
    )
    result, count = lint([path])
    assert count == 3
    assert sorted(f.kernel for f in result) == ["one", "three", "two"]


def test_a_name_that_is_rebound_to_a_number_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "rebound.py"
    path.write_text(
        "import nki\nimport nki.language as nl\n@nki.jit\ndef k(a: nl.ndarray):\n"
        "    t = nl.zeros((128, 4), dtype=nl.float32)\n    t = 4\n    return t + 1\n"
    )
    assert lint([path])[0] == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.py"
    path.write_text("import nki\n@nki.jit\ndef k(a):\n    return a is None\n")
    assert main([str(path)]) == 0
    assert main([str(path), "--strict"]) == 1
    capsys.readouterr()
    assert main([str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["rule"], row["line"], row["severity"]) for row in rows] == [("is-none", 4, "warning")]
    with pytest.raises(ValueError, match=r"no such file or folder: .*missing.py; see nkisim lint --help"):
        main([str(tmp_path / "missing.py")])
