"""Writing bundles: each file whole or absent, the manifest last, an interrupted build resumed, a good bundle kept.

`.build/` holds one small record per finished file, and one per shard that grows: the recipe (the hash of its inputs),
its digest, its size, and the number of its inode. A file whose record has the wanted recipe, whose digest still holds
and which is still that inode is not made again. So records that came with a copy or out of an archive are ignored: only
a process that can write in the folder while it is ours can forge one. Where a bundle is already, the new one grows in a
hidden folder beside it, with links to the files that both have, and the two are exchanged when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from compile.bundle.own import own_folder, read_own, refuse_links, settle, write_whole
from compile.bundle.sources import SOURCES
from compile.bundle.swap import RECORDS, exchange, locked, recover
from model.errors import UserError
from model.strict import Wrong, read
from trnspec.bundle.manifest import FOLDERS, FORMAT, MANIFEST, File, canonical_hash, parse_manifest, sha256_of
from trnspec.bundle.signature import SIGNATURE


@dataclass(frozen=True)
class StagedFile:
    """A file to make: its name in the bundle, the hash of its inputs, and how it is made.

    `write` puts it at a path, and returns its sha256 if it knows that without reading the file again.
    """

    name: str
    recipe: str
    write: Callable[[Path], str | None]


class Staging:
    """An output folder under construction; `folder` is where its files are made."""

    def __init__(self, out: Path, beside: bool = True) -> None:
        self.out, real = out, resolved(out)
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file; give a folder as --out")
        if out.is_dir() and any(out.iterdir()) and not self._ours():
            raise UserError(f"{out} is not empty and holds no bundle; give an empty or new folder as --out")
        served = beside and (out / MANIFEST).exists()
        self.folder = real.with_name(f".{real.name}.building") if served else out
        self._places = dict.fromkeys([self.folder, out])
        for place in self._places:
            refuse_links(place, (*FOLDERS, RECORDS))
        self._kept: dict[str, Path] = {}
        self._changed = False
        self._held = contextlib.ExitStack()

    def _ours(self) -> bool:
        if (self.out / RECORDS).is_dir():
            return True
        try:
            return bool(json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    @property
    def replaces(self) -> bool:
        """Whether a bundle is served from the folder while the new one is made beside it."""
        return self.folder != self.out

    @property
    def sources(self) -> Path:
        """The file that remembers the checkpoints' digests."""
        return self.out / RECORDS / SOURCES

    def finished(self, file: StagedFile) -> File | None:
        """The record of a file that need not be made again, here or in the bundle that is served."""
        for place in self._places:
            kept = recorded(place, file.name)
            if kept and kept.recipe == file.recipe and _intact(place / file.name, kept):
                self._kept[file.name] = place
                return kept
        return None

    def keep(self, name: str, entry: File) -> None:
        """Take a file of the served bundle as it is, by its entry in the manifest."""
        self._kept[name] = self.out
        record(self.out, name, entry)

    def begin(self) -> None:
        """Mark the folder as ours and unfinished, and bring the kept files there."""
        if self.replaces:
            self._begin_beside()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name, place in self._kept.items():
            if place != self.folder and (entry := recorded(place, name)):
                _link(place / name, self.folder / name)
                record(self.folder, name, entry)

    def _begin_beside(self) -> None:
        if os.path.ismount(self.out):
            raise UserError(
                f"{self.out} holds a bundle and is a mounted disk, where a new one cannot take its place at once; "
                "give a folder below it as --out"
            )
        # its lock goes where the folder goes: after the exchange, both names are held
        self._held.close()
        own_folder(self.folder)
        self._held.enter_context(locked(self.folder))
        compiled, here = (place / RECORDS / "neuron" for place in (self.out, self.folder))
        if compiled.is_dir() and not here.exists():
            compiled.rename(here)
        if self.sources.exists():
            _link(self.sources, self.folder / RECORDS / SOURCES)

    def path(self, name: str) -> Path:
        """Where a finished file is."""
        return self._kept.get(name, self.folder) / name

    def make(self, file: StagedFile) -> File:
        """Make a file; it appears under its name only when it is complete."""
        self._changed = True
        path = self.folder / file.name
        record_file(self.folder, file.name).unlink(missing_ok=True)
        if path.parent != self.folder:
            own_folder(path.parent)
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        digest = file.write(temporary) or sha256_of(temporary)
        entry = File(file.recipe, digest, temporary.stat().st_size)
        settle(temporary, path)
        record(self.folder, file.name, entry)
        return entry

    def finish(self, manifest: bytes, names: set[str]) -> None:
        """Drop every other file, write the manifest, last, and put the folder where it is served."""
        changed = self._changed or any(place != self.out for place in self._kept.values())
        with contextlib.suppress(OSError):
            if not changed and (self.out / MANIFEST).read_bytes() == manifest:
                self._retire()
                return
        self.begin()
        _drop_strangers(self.folder, names)
        parse_manifest(manifest, str(self.folder / MANIFEST))
        write_whole(self.folder / MANIFEST, manifest)
        if self.replaces:
            exchange(self.folder, resolved(self.out))
            self._retire()

    def _retire(self) -> None:
        """Remove the bundle that was replaced; a user's own files in its folder move on to the new one."""
        if not self.replaces or self.folder.is_symlink() or not self.folder.is_dir():
            return
        ours = {*FOLDERS, RECORDS, MANIFEST, SIGNATURE, "model.pt", "neuron_config.json"}
        for path in self.folder.iterdir():
            if path.name not in ours and path.suffix != ".tmp" and not (self.out / path.name).exists():
                path.rename(self.out / path.name)
        shutil.rmtree(self.folder)

    def finish_copy(self, manifest: bytes, names: set[str]) -> None:
        """Write the manifest of a bundle whose files were copied here, last and as it was."""
        _drop_strangers(self.folder, names)
        shutil.rmtree(self.folder / RECORDS)
        write_whole(self.folder / MANIFEST, manifest)

    def release(self) -> None:
        """Let others build here."""
        self._held.close()


@contextlib.contextmanager
def staged(out: Path, beside: bool = True) -> Iterator[Staging]:
    """A folder to build in, held against other builders; UserError if it is held or a stranger's.

    With `beside` False a bundle that is there is mended in its place.
    """
    recover(resolved(out))
    Staging(out, beside)
    with locked(out):
        # the content is certain only now that no other process changes it
        staging = Staging(out, beside)
        try:
            yield staging
        finally:
            staging.release()


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


def _intact(file: Path, entry: File) -> bool:
    plain = file.is_file() and not file.is_symlink()
    return plain and file.stat().st_size == entry.bytes and sha256_of(file) == entry.sha256


def _link(source: Path, target: Path) -> None:
    """The same bytes under a second name; a copy where links are not possible."""
    own_folder(target.parent)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _drop_strangers(folder: Path, names: set[str]) -> None:
    known = {record_file(folder, name) for name in names}
    for file in (folder / RECORDS).glob("*.json"):
        if file not in known:
            file.unlink()
    for name in {"model.pt", "neuron_config.json"} - names:
        (folder / name).unlink(missing_ok=True)
    for below in FOLDERS:
        for file in (folder / below).rglob("*"):
            if file.relative_to(folder).as_posix() not in names and (file.is_symlink() or not file.is_dir()):
                file.unlink()


def record_file(folder: Path, name: str) -> Path:
    """Where the record of a file of a folder is."""
    return folder / RECORDS / (canonical_hash(name)[:16] + ".json")


def record(folder: Path, name: str, entry: File) -> None:
    """Note what a build made: a file, or the beginning of one that grows."""
    note = asdict(entry) | {"inode": (folder / name).stat().st_ino}
    own_folder(folder / RECORDS)
    write_whole(record_file(folder, name), json.dumps(note).encode())


def recorded(folder: Path, name: str) -> File | None:
    """The record that a build made of a file, while it is the same file."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, Wrong):
        note = json.loads(read_own(record_file(folder, name)))
        if note.pop("inode") == (folder / name).stat().st_ino:
            return read(File, note)
    return None
