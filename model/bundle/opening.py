"""`open_bundle`: the one way to load a bundle, after every byte of it has been held against its manifest.

A verified bundle is remembered by a stamp in its folder: while inode, size, times and recorded digest of every file
are what they were, the files are not read again. Reading takes about 1.5 s a GB and core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model.bundle.manifest import Bundle, canonical_hash, read_bundle, sha256_of
from model.bundle.signature import check_signed, key_of
from model.errors import UserError
from model.progress import progress

STAMP = ".verified"
_READERS = min(4, os.cpu_count() or 1)


def open_bundle(path: Path, verify: bool = True) -> Bundle:
    """The bundle in a folder, whole; UserError names the first file that is not what the manifest says.

    Without `verify` only the manifest is checked: a damaged or exchanged file then runs, and its output is anything.
    """
    bundle, signed = read_bundle(path), key_of()
    if signed:
        check_signed(path, signed)
    state = _state(bundle)
    # a stamp is as writable as the files: where a signature is asked for, it is no proof
    if verify and (signed or not _stamped(bundle, state)):
        if sentences := damage(bundle):
            raise UserError(f"{path} is damaged: {sentences[0]}; build the bundle again or copy it again")
        _stamp(bundle, state)
    return bundle


def damage(bundle: Bundle) -> list[str]:
    """One sentence for each file that is missing, of another size or another content; every byte is read."""
    files = sorted(bundle["files"].items())
    total = sum(entry["bytes"] for _, entry in files)
    with progress(f"verifying {bundle.path}", total, "bytes") as task, ThreadPoolExecutor(_READERS) as pool:
        clauses = pool.map(lambda file: fault_of(bundle.path / file[0], file[1], task.advance), files)
        return [f"{name} {clause}" for (name, _), clause in zip(files, clauses, strict=True) if clause]


def fault_of(file: Path, entry: dict[str, Any], told: Callable[[int], None] = lambda count: None) -> str:
    """How a file differs from its entry in the manifest, as the end of a sentence; nothing if it does not."""
    try:
        if not file.is_file():
            return "is missing"
        if (size := file.stat().st_size) != entry["bytes"]:
            return f"has {size} bytes, the manifest says {entry['bytes']}"
        if sha256_of(file, told) != entry["sha256"]:
            return "has another content than the manifest says (sha256 differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _state(bundle: Bundle) -> str:
    """What must differ when any file does: of each its place, size, times and recorded digest; "" if one is missing."""
    try:
        stats = {name: (bundle.path / name).stat() for name in bundle["files"]}
    except OSError:
        return ""
    places = {n: [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for n, s in stats.items()}
    digests = {name: entry["sha256"] for name, entry in bundle["files"].items()}
    return canonical_hash([bundle["manifest_sha256"], places, digests])


def _stamped(bundle: Bundle, state: str) -> bool:
    try:
        return bool(state) and (bundle.path / STAMP).read_text(encoding="utf-8") == state
    except (OSError, ValueError):
        return False


def _stamp(bundle: Bundle, state: str) -> None:
    """Remember the state that was verified; a folder that cannot be written is verified at each start."""
    temporary = bundle.path / f"{STAMP}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(state, encoding="utf-8")
        temporary.replace(bundle.path / STAMP)
