"""What nothing forces, computed once a session and shared by its workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.processors.environments import UNFORCED, results


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this session share, and no other session: results of other code are not these."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processors"
    folder.mkdir(exist_ok=True)
    return folder


def once(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of the first worker that asks."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(compute()), encoding="utf-8")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="session")
def kernels(shared: Path) -> dict[str, Any]:
    """Digests of instructions and kernels."""
    return once(shared / "kernels.json", lambda: results(UNFORCED, "kernels"))


@pytest.fixture(scope="session")
def bundle(shared: Path) -> Path:
    """The demo bundle."""
    once(shared / "bundle.json", lambda: results(UNFORCED, "demo_bundle", str(shared / "demo")))
    return shared / "demo"


@pytest.fixture(scope="session")
def ids(shared: Path, bundle: Path) -> dict[str, Any]:
    """The demo bundle's ids."""
    return once(shared / "ids.json", lambda: results(UNFORCED, "ids", str(bundle)))
