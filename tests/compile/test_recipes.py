"""A file of a bundle is made again when its makers change, and only then."""

import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from compile import recipes
from compile.build import build, build_and_count
from compile.graph.trace import lower_graph
from compile.recipes import CUT_BY, ROOT, TRACED_BY, sources
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.packing import Packing
from tests.compile.tiny import shard_of, spec
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.plan import make_plan

# run while a graph is traced or a shard is cut, with no say in their bytes: what they compute is hashed as a value
_HASHED_AS_VALUES = (
    "model/cut.py",
    "model/graph_spec.py",
    "trnspec/bundle/part.py",
    "trnspec/bundle/spec.py",
    "model/weights.py",
    "model/graph_key.py",
)


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    """A folder with a tiny pair and its bundle."""
    build(spec(base))
    return base


@pytest.fixture
def sources_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's sources where a test may edit them; recipes look there."""
    for room in ("model", "trnspec", "compile", "nki_kernels"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    return tmp_path


def _made(base: Path) -> set[str]:
    """What a build over the bundle makes anew."""
    before = {p: p.stat().st_mtime_ns for folder in ("hlo", "weights") for p in (base / "bundle" / folder).iterdir()}
    build_and_count(spec(base))
    return {p.parent.name for p, at in before.items() if p.stat().st_mtime_ns != at}


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r}"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_packing_constant_makes_shards_and_graphs_anew(base: Path, sources_copied: Path) -> None:
    assert _made(base) == set()
    _edit(sources_copied / "nki_kernels/layer/pack_weights.py", "most: int = BANK", "most: int = BANK // 2")
    assert _made(base) == {"hlo", "weights"}
    assert _made(base) == set()


def test_the_code_that_cuts_makes_shards_anew_and_no_graph(base: Path, sources_copied: Path) -> None:
    _made(base)
    _edit(sources_copied / "trnspec/bundle/checkpoint.py", '"""', '"""Changed. ')
    assert _made(base) == {"weights"}


def test_a_help_text_rebuilds_nothing(base: Path, sources_copied: Path) -> None:
    _made(base)
    _edit(sources_copied / "compile/spec.py", "tensor-parallel ranks", "ranks that share each layer")
    _edit(sources_copied / "compile/build.py", '"""', '"""Changed. ')
    _edit(sources_copied / "model/generate.py", "0 is greedy (default)", "0 takes the best token")
    assert _made(base) == set()


def test_a_folder_is_read_to_the_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    deep = tmp_path / "model/nki/deeper"
    deep.mkdir(parents=True)
    (deep / "launch.py").write_text("", encoding="utf-8")
    assert list(sources(["model"])) == ["model/nki/deeper/launch.py"]


def test_a_build_checks_its_own_spec(base: Path) -> None:
    with pytest.raises(UserError, match="k is 40"):
        build(spec(base, k=40))


def _files_that_run(call: Any) -> set[str]:
    """Files of ours whose functions run during a call."""
    ran: set[str] = set()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    rooms = ("model", "trnspec", "compile", "nki_kernels")
    inside = [Path(name) for name in ran if Path(name).is_relative_to(ROOT)]
    named = (p.relative_to(ROOT).as_posix() for p in inside)
    return {name for name in named if name.split("/")[0] in rooms}


@pytest.mark.parametrize("kernels", ["reference", "nki"])
def test_what_runs_while_a_graph_is_traced_is_in_its_recipe(base: Path, kernels: str) -> None:
    """Of the graphs that ask and filter, which run what the others run too."""
    plan = make_plan(spec(base, kernels=kernels, k=2).bundle)
    steps = [g for g in plan.graphs if g.key.bucket == 128 and (g.key.asking or g.key == GraphKey(Stage.STEP, 2, 128))]
    assert len(steps) == 5
    for graph in steps:
        ran = _files_that_run(lambda graph=graph: lower_graph(plan.spec, graph))
        assert "model/speculative.py" in ran
        assert ran <= {*sources(TRACED_BY), *_HASHED_AS_VALUES}


def test_what_runs_while_a_shard_is_cut_is_in_its_recipe(base: Path) -> None:
    of_pair = spec(base)
    target = of_pair.bundle.target_config
    packing = Packing(attention=True, mlp=True)

    def cut() -> None:
        shard_of(Checkpoint(Path(of_pair.target), target), 0, 1, torch.float32, packing)

    ran = _files_that_run(cut)
    assert {"trnspec/bundle/checkpoint.py", "nki_kernels/layer/pack_weights.py"} <= ran
    assert ran <= {*sources(CUT_BY), *_HASHED_AS_VALUES}
