"""The sha256 of a checkpoint's files, remembered while a file's place, size and times are the same.

A copy of a checkpoint is the same checkpoint in any folder and with any times; it is read once to know that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compile.bundle.lanes import THREADS
from compile.bundle.own import read_own, write_whole
from trnspec.bundle.manifest import sha256_of

# beside the records of a bundle's files
SOURCES = "sources"


def digests(files: Sequence[Path], memory: Path) -> list[str]:
    """The sha256 of each file; `memory` is the file that keeps them."""
    remembered, wanted = _remembered(memory), {str(file): _state(file) for file in files}
    changed = [file for file in files if remembered.get(str(file), ([], ""))[0] != wanted[str(file)]]
    if changed:
        with ThreadPoolExecutor(THREADS) as readers:
            read = dict(zip(map(str, changed), readers.map(sha256_of, changed), strict=True))
        remembered |= {name: (wanted[name], digest) for name, digest in read.items()}
        write_whole(memory, json.dumps(remembered).encode())
    return [remembered[str(file)][1] for file in files]


def _state(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(memory: Path) -> dict[str, tuple[list[int], str]]:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        stored = json.loads(read_own(memory))
        return {name: (state, digest) for name, (state, digest) in stored.items()}
    return {}
