"""The tiny pair in a folder for each module or test, a bundle of its target, and a compiler."""

import shutil
from pathlib import Path

import pytest

from compile.build import build
from tests.compile import fake_sdk
from tests.compile.tiny import spec, write_pair


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder with a tiny pair that a test may change."""
    write_pair(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the tiny target, which has few files."""
    folder = tmp_path_factory.mktemp("built")
    write_pair(folder)
    return build(spec(folder, k=0, batch=1))


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "bundle"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for neuronx-cc, without nki; it looks for the kernels that a graph calls."""
    fake_sdk.write_compiler(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path / "bin"
