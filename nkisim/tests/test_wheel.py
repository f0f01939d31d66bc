"""nkisim by itself: its wheel in an environment with numpy and ml_dtypes and nothing else runs the README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.metadata import Metadata

import nkisim

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# what a fresh environment has: linked, so that nothing is fetched
ALLOWED = ("numpy*", "ml_dtypes*")
# without a path to the sources
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def block(first_line: str) -> str:
    """The README's fenced block that begins with a line."""
    (text,) = [b for b in re.findall(r"^```\w+\n(.*?)^```", README, re.S | re.M) if b.startswith(first_line)]
    return text


def in_folder(folder: Path, *command: Path | str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees no path to the sources."""
    return subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the backend from a copy of the folder, in a process that is not a module of ours."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "nkisim", ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build"))
    program = "from setuptools import build_meta; build_meta.build_wheel('..'); build_meta.build_sdist('..')"
    subprocess.run([sys.executable, "-c", program], cwd=folder / "nkisim", check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def isolated(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds only the wheel; pip would refuse a third dependency."""
    folder = tmp_path_factory.mktemp("isolated")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    for pattern in ALLOWED:
        for path in Path(np.__file__).parents[1].glob(pattern):
            (site / path.name).symlink_to(path)
    command = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-index", wheel]
    subprocess.run(list(map(str, command)), env=CLEAN, check=True, capture_output=True)
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    data = {"nkisim/py.typed", "nkisim/nki_0_6_signatures.json", "nkisim/nki_0_7_signatures.json"}
    assert {n for n in names if ".dist-info/" not in n} == sources | data
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_it_needs_numpy_and_ml_dtypes(wheel: Path) -> None:
    members = zipfile.ZipFile(wheel)
    (name,) = [n for n in members.namelist() if n.endswith("METADATA")]
    metadata = Metadata.from_email(members.read(name), validate=True)
    assert sorted(r.name for r in metadata.requires_dist or () if not r.marker) == ["ml_dtypes", "numpy"]
    assert str(metadata.version) == nkisim.__version__


def test_the_sdist_is_the_folder(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        (root, *_), names = (archive.getnames(), {n.partition("/")[2] for n in archive.getnames()})
        information = archive.extractfile(f"{root}/PKG-INFO")
        assert information
        Metadata.from_email(information.read(), validate=True)
    folders = [ROOT / folder for folder in ("docs", "examples", "src", "tests", "validation")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".md", ".json", ".yml")]
    assert {f.relative_to(ROOT).as_posix() for f in files} | {"Makefile", "LICENSE", "CHANGELOG.md"} <= names


def test_every_module_loads_without_ours(isolated: Path, tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, sys, nkisim\n"
        "names = [m.name for m in pkgutil.walk_packages(nkisim.__path__, 'nkisim.') if '__main__' not in m.name]\n"
        "for name in names: name == 'nkisim.pytest_plugin' or importlib.import_module(name)\n"
        "print(len(names), sorted({'torch', 'jax', 'pytest', 'model', 'nki_kernels'} & set(sys.modules)))\n"
    )
    done = in_folder(tmp_path, isolated / "python", "-c", program)
    count, others = done.stdout.split(maxsplit=1)
    assert int(count) > 75, done.stderr
    assert others == "[]\n"
    assert "No module named validation" in in_folder(tmp_path, isolated / "python", "-m", "validation").stderr


def test_the_readme_s_first_screen_prints_its_output(isolated: Path, tmp_path: Path) -> None:
    (tmp_path / "softmax.py").write_text(block("# softmax.py"), encoding="utf-8")
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block("$ nkisim run"), re.M)
    assert len(steps) == 4
    for command, printed in steps:
        words = shlex.split(command)
        done = in_folder(tmp_path, isolated / words[0], *words[1:])
        assert done.stdout + done.stderr == printed
        assert done.returncode == (2 if printed.startswith("error") else 0)
    assert (tmp_path / "softmax.svg").read_bytes() == (ROOT / "softmax.svg").read_bytes()


def test_the_readme_s_test_passes_here(tmp_path: Path) -> None:
    for name in ("softmax.py", "test_softmax.py"):
        (tmp_path / name).write_text(block(f"# {name}"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nkisim.pytest_plugin", "test_softmax.py"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
