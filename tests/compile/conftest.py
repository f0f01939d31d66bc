"""The tiny pair in a folder for each module, a copy of the bundle that a module has built of it, and a compiler."""

import shutil
from pathlib import Path

import pytest

from tests.compile import fake_sdk
from tests.compile.tiny import write_pair


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.fixture
def bundle(base: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change, of the bundle that the module's `base` has built."""
    return Path(shutil.copytree(base / "bundle", tmp_path / "bundle"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with neuronx-cc alone, a stand-in that looks for the kernels that a graph calls: its folder."""
    fake_sdk.write_compiler(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path / "bin"
