"""The tiny pair in a folder for each module, and a copy of the bundle that a module has built of it."""

import shutil
from pathlib import Path

import pytest

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
