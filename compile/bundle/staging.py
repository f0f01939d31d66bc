"""A bundle is made in `.NAME.building` beside its place, file by file, and put there when it is complete.

A bundle's `.build/records` has a line for each file that a build made: its recipe (the hash of its inputs), digest,
size and inode. A file of the bundle in place, or of a build that was killed, is reused if it has the wanted recipe, its
bytes have the digest, and it is that inode: a record that came with a copy or an archive is ignored.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from model.errors import UserError
from model.strict import Wrong, read
from trnspec.bundle.manifest import FILES, FOLDERS, FORMAT, MANIFEST, MANIFEST_BYTES, File, parse_manifest, sha256_of
from trnspec.bundle.opening import read_small
from trnspec.bundle.signature import SIGNATURE

BUILD, _RECORDS = ".build", ".build/records"
# source: include/uapi/linux/fs.h and fcntl.h (torvalds/linux)
_EXCHANGE, _AT_FDCWD = 2, -100


class StagedFile(NamedTuple):
    """A file to make: its name in the bundle, its recipe, and how it is written to a path."""

    name: str
    recipe: str
    write: Callable[[Path], object]


class Staging:
    """A bundle under construction: `folder` is where its files are made, `out` its place."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.folder, self._work = out, private_folder(work / "bundle"), work
        for path in self.folder.rglob("*"):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                path.unlink()
        self._records = {place: _records(place) for place in (out, self.folder)}
        # whether each file is the one in place
        self._in_place = dict[str, bool]()
        self.made = 0

    def reuse(self, name: str, recipe: str) -> File | None:
        """The entry of a file that need not be made again, and is now in `folder`."""
        for place, records in self._records.items():
            inode, entry = records.get(name, (0, None))
            if entry and entry.recipe == recipe and _inode(place / name) == inode and self.take(name, entry):
                self._record(name, entry)
                return entry
        return None

    def take(self, name: str, entry: File) -> bool:
        """Whether there is a file with the content of an entry, which is now in `folder`."""
        for place in self._records:
            file = place / name
            intact = file.is_file() and not file.is_symlink() and file.stat().st_size == entry.bytes
            if intact and sha256_of(file) == entry.sha256:
                if place == self.out:
                    temporary = self.temporary(name)
                    try:
                        temporary.hardlink_to(file)
                    except OSError:
                        shutil.copyfile(file, temporary)
                    temporary.replace(self.folder / name)
                self._in_place[name] = place == self.out
                return True
        return False

    def temporary(self, name: str) -> Path:
        """Where a file is written before `add` gives it its name."""
        path = self.folder / f"{name}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path

    def settle(self, name: str) -> None:
        """Give a file that was written its name."""
        settle(self.folder / f"{name}.tmp", self.folder / name)
        self._in_place[name] = False
        self.made += 1

    def add(self, name: str, recipe: str, digest: str = "") -> File:
        """The same, and record it; its entry."""
        self.settle(name)
        entry = File(recipe, digest or sha256_of(self.folder / name), (self.folder / name).stat().st_size)
        self._record(name, entry)
        return entry

    def make(self, file: StagedFile) -> File:
        """The entry of a file that is reused or made; it has its name when it is complete."""
        if entry := self.reuse(file.name, file.recipe):
            return entry
        file.write(self.temporary(file.name))
        return self.add(file.name, file.recipe)

    def path(self, name: str) -> Path:
        """Where a file is that was reused or made."""
        return self.folder / name

    def _record(self, name: str, entry: File) -> None:
        line = json.dumps([name, _inode(self.folder / name), asdict(entry)])
        (self.folder / BUILD).mkdir(exist_ok=True)
        with (self.folder / _RECORDS).open("a", encoding="utf-8") as records:
            # the last line of a killed build may be cut
            records.write(f"\n{line}\n")

    def finish(self, manifest: bytes, signature: bytes | None = None) -> None:
        """Drop all other files, write the manifest and put the folder in its place, unless the same bundle is there."""
        parse_manifest(manifest, str(self.out / MANIFEST))
        contents = {MANIFEST: manifest} | ({SIGNATURE: signature} if signature else {})
        same = all(_read(self.out / name) == content for name, content in contents.items())
        if not same or not all(self._in_place.values()):
            for path in self.folder.rglob("*"):
                name = path.relative_to(self.folder).as_posix()
                if path.is_file() and name not in self._in_place and not name.startswith(f"{BUILD}/"):
                    path.unlink()
            for name, content in contents.items():
                write_whole(self.folder / name, content)
            _put(self.folder, resolved(self.out), self._work / "old")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Staging]:
    """A folder to build in; UserError if another process does, or if the place is not a bundle's."""
    real = resolved(out)
    work = real.with_name(f".{real.name}.building")
    with _locked(private_folder(work)):
        try:
            if not real.exists() and (work / "old").is_dir():
                (work / "old").rename(real)
            shutil.rmtree(work / "old", ignore_errors=True)
            _check_place(out)
            yield Staging(out, work)
        finally:
            # what a failed build made is for the next one
            if not any(path.is_file() and path.name != "lock" for path in (work / "bundle").rglob("*")):
                shutil.rmtree(work, ignore_errors=True)


def _check_place(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder as --out")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if out.is_dir() and os.path.ismount(out):
        raise UserError(f"{out} is a mounted disk, where no bundle can be put in place at once; give a folder below it")
    try:
        ours = not names or BUILD in names or json.loads(_read(out / MANIFEST) or b"")["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise UserError(f"{out} is not empty and holds no bundle; give an empty or new folder as --out")
    if strange := sorted(names - {BUILD, MANIFEST, SIGNATURE, *FOLDERS, *FILES}):
        raise UserError(f"{out / strange[0]} is no file of a bundle, whose folder is replaced; move it elsewhere")


def resolved(out: Path) -> Path:
    """The folder that a path leads to; UserError for the root of all folders, and for links in a circle."""
    try:
        real = out.resolve()
        os.stat(real)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its links go in a circle"
        raise UserError(f"{ascii(str(out))[1:-1]} cannot be a folder ({why}); give a new or empty one") from error
    if not real.name:
        raise UserError(f"{out} is the root of all folders; give a folder below it")
    return real


def private_folder(folder: Path) -> Path:
    """Make a folder, or take one that is there; UserError for a link, for no folder, and for another user's.

    Another user is neither this one nor the owner of the folder above, who could replace it anyway.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), folder.parent.stat().st_uid):
        raise UserError(f"{folder} is a link, no folder, or another user's; remove it and run the command again")
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time in a folder; a killed one leaves no lock."""
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process that had the lock removes the file at its end
            lost = not os.path.samestat(os.fstat(fd), (folder / "lock").stat())
        except (BlockingIOError, FileNotFoundError):
            lost = True
        if lost:
            raise UserError(f"{folder} is being written by another process; wait for its end, or choose another --out")
        yield


def _put(new: Path, place: Path, aside: Path) -> None:
    """Put a folder in its place, at once where the file system can exchange two names; what was there goes."""
    if not place.exists() or not any(place.iterdir()):
        new.rename(place)
    elif not _exchange(new, place):
        # killed here, the next build brings the old bundle back
        place.rename(aside)
        new.rename(place)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _records(place: Path) -> dict[str, tuple[int, File]]:
    """File -> its inode and entry, as builds noted them."""
    records = dict[str, tuple[int, File]]()
    for line in (_read(place / _RECORDS) or b"").splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError, Wrong):
            name, inode, entry = json.loads(line)
            records[name] = inode, read(File, entry)
    return records


def _read(file: Path) -> bytes | None:
    """The bytes of a small regular file, if there is one."""
    with contextlib.suppress(UserError):
        return read_small(file.name, MANIFEST_BYTES, None, file.parent)
    return None


def _inode(file: Path) -> int:
    return file.stat().st_ino if file.is_file() else -1


def write_whole(file: Path, content: bytes) -> None:
    """Write a small file, force it to the disk and give it its name."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as out:
        out.write(content)
    settle(temporary, file)


def settle(temporary: Path, final: Path) -> None:
    """Force a file's bytes to the disk and give it its name."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(final)


def free_space(folder: Path, needed: int) -> None:
    """UserError if the disk of a folder has less free bytes."""
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < needed:
        have, want, lacking = (f"{n / 1e6:,.2f} MB" for n in (free, needed, needed - free))
        raise UserError(
            f"{want} are needed and {folder} has {have} free, {lacking} too little; free some space or choose a "
            "different folder"
        )
