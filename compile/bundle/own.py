"""Folders and files that a build writes: its own, never a link to files of a different owner."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from model.errors import UserError


def own_folder(folder: Path) -> Path:
    """Make a folder, or take the existing one; UserError for a link, for no folder, or for a stranger's folder.

    A stranger is neither this user nor the owner of the folder above, who could replace it anyway.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), folder.parent.stat().st_uid):
        raise UserError(
            f"{folder} is a link, no folder, or a different user's, and a build writes in folders of its own; remove "
            "it and run the command again"
        )
    return folder


def refuse_links(folder: Path, names: tuple[str, ...]) -> None:
    """UserError if one of these, where a build writes below a folder, is a link."""
    for name in names:
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a link, and a build writes in folders of its own; remove it")


def open_own(file: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """A descriptor of a regular file, made if it is not there; OSError, which names it, if it is a link."""
    fd = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"{file} is not a regular file; remove it and run the command again")
    return fd


def read_own(file: Path) -> bytes:
    """The bytes of a note that a build left; OSError if there is none, or it is a link or anything else."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as note:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{file} is no regular file")
        return note.read(_NOTE_BYTES)


# the largest note, of a build of 64 shards, has a few KB
_NOTE_BYTES = 16 << 20


def write_whole(file: Path, content: bytes) -> None:
    """Write a small file under a name beside it, force it to the disk and give it its name."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
        out.write(content)
    settle(temporary, file)


def settle(temporary: Path, final: Path) -> None:
    """Force a file's bytes to the disk and give it its name."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(final)
