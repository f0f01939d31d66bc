"""A bundle is made in `.NAME.building` next to its place, file by file, and put there when it is complete.

A bundle's `.build/records` has a line for each file that a build made: its recipe (the hash of its inputs), digest,
size and inode. A file of the bundle in place, or of a build that was killed, is reused if it has the wanted recipe, its
bytes have the digest, and it is that inode: a record that came with a copy or an archive is ignored.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from model.errors import UserError
from model.strict import ValidationError, read
from trnspec.bundle.manifest import FILES, FOLDERS, FORMAT, MANIFEST, MANIFEST_BYTES, File, sha256_of
from trnspec.bundle.opening import read_small
from trnspec.bundle.signature import SIGNATURE

BUILD, _RECORDS = ".build", ".build/records"
# source: include/uapi/linux/fs.h and fcntl.h (torvalds/linux)
_EXCHANGE, _AT_FDCWD = 2, -100


# a file to make: its name in the bundle, its recipe, and how it is written to a path
StagedFile = tuple[str, str, Callable[[Path], object]]


class Staging:
    """A bundle under construction: `folder` is where its files are made, `out` its place."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.folder, self._work, self.made = out, work / "bundle", work, 0
        for path in work.rglob("*"):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                path.unlink()
        self.folder.mkdir(exist_ok=True)
        self._records = {place: _records(place) for place in (out, self.folder)}
        self._names = set[str]()

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
        for file in (place / name for place in self._records):
            if _inode(file) >= 0 and file.stat().st_size == entry.bytes and sha256_of(file) == entry.sha256:
                if file != self.folder / name:
                    temporary = self.temporary(name)
                    try:
                        temporary.hardlink_to(file)
                    except OSError:
                        shutil.copyfile(file, temporary)
                    temporary.replace(self.folder / name)
                self._names.add(name)
                return True
        return False

    def make(self, file: StagedFile) -> File:
        """The entry of a file that is reused or made; it has its name when it is complete."""
        name, recipe, write = file
        if entry := self.reuse(name, recipe):
            return entry
        write(self.temporary(name))
        return self.add(name, recipe)

    def temporary(self, name: str) -> Path:
        """Where a file is written before `add` or `settle` gives it its name."""
        path = self.folder / f"{name}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path

    def settle(self, name: str) -> None:
        """Give a file that was written its name."""
        _settle(self.folder / f"{name}.tmp", self.folder / name)
        self._names.add(name)
        self.made += 1

    def add(self, name: str, recipe: str, digest: str = "") -> File:
        """Give a file that was written its name, record it, and return its entry in the manifest."""
        self.settle(name)
        file = self.folder / name
        entry = File(recipe, digest or sha256_of(file), file.stat().st_size)
        self._record(name, entry)
        return entry

    def _record(self, name: str, entry: File) -> None:
        (self.folder / BUILD).mkdir(exist_ok=True)
        with (self.folder / _RECORDS).open("a", encoding="utf-8") as records:
            # the last line of a killed build may be cut
            records.write(f"\n{json.dumps([name, _inode(self.folder / name), asdict(entry)])}\n")

    def check_space(self, needed: int) -> None:
        """Raise UserError if the disk has less free bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"{needed / 1e6:,.2f} MB are needed and {self.out.absolute()} has {free / 1e6:,.2f} MB free, "
                f"{(needed - free) / 1e6:,.2f} MB too little; free some space or choose a different folder"
            )

    def finish(self, manifest: bytes, signature: bytes | None = None) -> None:
        """Drop all other files, write the manifest and put the folder in its place."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in {*self._names, _RECORDS}:
                path.unlink()
        for name, content in {MANIFEST: manifest, SIGNATURE: signature}.items():
            if content:
                write_small(self.folder / name, content)
        place = self.out.resolve()
        if not place.exists() or not any(place.iterdir()):
            self.folder.rename(place)
        elif not _exchange(self.folder, place):
            # killed here, the next build brings the old bundle back
            place.rename(self._work / "old")
            self.folder.rename(place)
        shutil.rmtree(self._work)


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Staging]:
    """A folder to build in; UserError if another process does, or if the place is not a bundle's."""
    try:
        place = out.resolve()
        if not place.name or (place.exists() and not place.is_dir()) or os.path.ismount(place):
            raise NotADirectoryError("it is a file or a mounted disk")
    except (OSError, RuntimeError, ValueError) as error:
        name, why = (ascii(str(part))[1:-1] for part in (out, error))
        raise UserError(f"{name} cannot be a bundle's folder ({why}); give a new or empty one") from error
    work = place.with_name(f".{place.name}.building")
    with _locked(work):
        try:
            if place.exists():
                shutil.rmtree(work / "old", ignore_errors=True)
            elif (work / "old").is_dir():
                (work / "old").rename(place)
            _refuse_others(place, out)
            yield Staging(out, work)
        finally:
            # what a build that failed has made is for the next one
            if not any(path.is_file() for path in work.rglob("*")):
                shutil.rmtree(work, ignore_errors=True)


def _refuse_others(place: Path, out: Path) -> None:
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    try:
        ours = not names or BUILD in names or json.loads(_read(place / MANIFEST))["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise UserError(f"{out} is not empty and is not a bundle; give an empty or new folder as --out")
    if strange := sorted(names - {BUILD, MANIFEST, SIGNATURE, *FOLDERS, *FILES}):
        raise UserError(f"{out / strange[0]} is not a file of a bundle, and a build replaces the folder; move the file")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time in a folder, which is made; a killed one leaves no lock."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link; remove it and run the command again")
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process that had the lock removes the folder at its end
            lost = not os.path.samestat(os.fstat(fd), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            lost = True
        if lost:
            raise UserError(f"{folder} is being written by another process; wait for its end, or choose another --out")
        yield
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name at once, where the file system can."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", lambda *_: -1)
    done = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0
    if not done and (number := ctypes.get_errno()) not in (0, errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(other))
    return done


def _records(place: Path) -> dict[str, tuple[int, File]]:
    """File -> its inode and entry, as builds noted them."""
    records = dict[str, tuple[int, File]]()
    for line in _read(place / _RECORDS).splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError, ValidationError):
            name, inode, entry = json.loads(line)
            records[name] = inode, read(File, entry)
    return records


def _read(file: Path) -> bytes:
    """The bytes of a small regular file; none of anything else."""
    with contextlib.suppress(UserError):
        return read_small(file, MANIFEST_BYTES) or b""
    return b""


def _inode(file: Path) -> int:
    """The inode of a regular file; -1 of anything else."""
    return file.stat().st_ino if file.is_file() and not file.is_symlink() else -1


def write_small(file: Path, content: bytes) -> None:
    """Write a small file, force it to the disk and give it its name."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as out:
        out.write(content)
    _settle(temporary, file)


def _settle(temporary: Path, final: Path) -> None:
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(final)
