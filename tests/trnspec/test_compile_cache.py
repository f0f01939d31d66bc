"""Compiled graphs are machine code: they are cached where only the user can write."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trnspec.runtime import compile_cache


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's options, as a process without any starts."""
    tmp_path.chmod(0o700)
    config = SimpleNamespace(jax_compilation_cache_dir=None, jax_enable_compilation_cache=True)
    config.update = lambda name, value: setattr(config, name, value)
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return vars(config)


def _folder(options: dict[str, Any]) -> Path | None:
    compile_cache.cache_compiled_graphs()
    folder = options["jax_compilation_cache_dir"]
    return Path(folder) if folder else None


def test_the_folder_is_private_and_of_this_processor(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = _folder(options)
    assert folder is not None
    assert folder.parent == tmp_path / "cache/trnspec"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert options["jax_compilation_cache_max_size"] == 4 << 30
    assert _folder(options) == folder, "a chosen folder stays"
    options["jax_compilation_cache_dir"] = None
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "model name: another\nflags: sse")
    assert _folder(options) not in (None, folder)


FAULTS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "writable": lambda folder, _: folder.chmod(0o770),
    "link": lambda folder, _: (folder.rmdir(), folder.symlink_to(folder.parents[2])),
    "file": lambda folder, _: (folder.rmdir(), folder.touch()),
    "owner": lambda _, patch: patch.setattr(os, "geteuid", lambda: 12345),
    "above": lambda folder, _: folder.parent.chmod(0o777),
    "off": lambda _, patch: patch.setattr(compile_cache.jax.config, "jax_enable_compilation_cache", False),
    "no home": lambda _, patch: patch.setenv("XDG_CACHE_HOME", "/proc/none"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_others_can_change_is_not_used(
    fault: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(options)
    assert folder is not None
    options["jax_compilation_cache_dir"] = None
    FAULTS[fault](folder, monkeypatch)
    assert _folder(options) is None
