"""One folder of demo bundles for the whole test session, also across its workers."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every worker of this session shares."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return folder
