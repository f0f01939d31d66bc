"""One builder at a time in a folder, and the exchange of a finished folder for the one that is served."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from compile.bundle.own import open_own, own_folder
from model.errors import UserError

RECORDS = ".build"
# source: include/uapi/linux/fs.h and fcntl.h (torvalds/linux)
_EXCHANGE, _AT_FDCWD = 2, -100


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder while files in it are made; UserError if a different process does. A killed one holds none."""
    with os.fdopen(open_own(own_folder(folder / RECORDS) / "lock"), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UserError(
                f"{folder} is being written by a different process; wait for its end and run the same command, "
                "or choose a different --out"
            ) from error
        yield


def exchange(new: Path, served: Path) -> None:
    """Give two folders each other's name, at once where the file system can; `new` then is the old one.

    Elsewhere there is a moment without `served`, from which `recover` brings it back.
    """
    if _renameat2(new, served):
        return
    aside = _aside(served)
    served.rename(aside)
    new.rename(served)
    aside.rename(new)


def recover(served: Path) -> None:
    """Bring back a folder whose exchange was killed in the moment when it had no name."""
    aside = _aside(served)
    if aside.is_dir() and not aside.is_symlink() and not served.exists():
        aside.rename(served)


def _aside(served: Path) -> Path:
    return served.with_name(f".{served.name}.old")


def _renameat2(one: Path, other: Path) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
