"""Compiled graphs of a CPU, cached for later processes of the same user on the same kind of processor."""

import hashlib
import os
import platform
import stat
from pathlib import Path

import jax


def cache_compiled_graphs() -> None:
    """Let JAX cache compiled graphs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR names a different one.

    JAX's keys are a graph's content, XLA's options and version; a folder is for one kind of processor. An entry is
    machine code, so a folder that others can write to is not used.
    """
    known = jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if known or not (folder := _private_folder(f"trnspec/graphs-{_processor()}")):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", 4 << 30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _private_folder(name: str) -> Path | None:
    """A folder of the user's cache that only the user can write to; None if there is none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        above, status = [parent.stat().st_mode for parent in folder.resolve().parents], folder.lstat()
    except (OSError, RuntimeError):
        return None
    replaceable = any(mode & 0o002 and not mode & stat.S_ISVTX for mode in above)
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if private and not replaceable and os.access(folder, os.W_OK) else None


def _processor() -> str:
    """A name for the processor's instruction set, for which XLA compiles."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    facts = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return hashlib.sha256("\n".join([platform.machine(), *sorted(facts)]).encode()).hexdigest()[:16]
