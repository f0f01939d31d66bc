"""Writing bundles: each file whole or absent, the manifest last, an interrupted build resumed, a good bundle kept.

`.build/` holds one small record per finished file: the recipe (the hash of what made it), its digest and its size. A
file whose record has the wanted recipe and whose digest still holds is not made again. Where a bundle is already, the
new one grows in a hidden folder beside it, with links to the files that both have, and the two are exchanged when it
is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile.bundle.sources import SOURCES
from compile.bundle.swap import RECORDS, exchange, locked, recover
from model.bundle.manifest import FORMAT, MANIFEST, canonical_hash, manifest_digest, parse_manifest, sha256_of
from model.bundle.opening import STAMP
from model.bundle.signature import SIGNATURE
from model.errors import UserError

FOLDERS = ("hlo", "neff", "logs", "weights", "tokenizer", "executables")


@dataclass(frozen=True)
class StagedFile:
    """A file to make: its name in the bundle, the hash of what makes it, and how.

    `write` puts it at a path, and returns its sha256 if it knows that without reading the file again.
    """

    name: str
    recipe: str
    write: Callable[[Path], str | None]


@dataclass(frozen=True)
class Record:
    """What is known of a finished file."""

    recipe: str
    sha256: str
    bytes: int


class Staging:
    """An output folder under construction; `folder` is where its files are made."""

    def __init__(self, out: Path, beside: bool = True) -> None:
        self.out = out
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file; give a folder as --out")
        if out.is_dir() and any(out.iterdir()) and not self._ours():
            raise UserError(f"{out} is not empty and holds no bundle; give an empty or new folder as --out")
        served = beside and (out / MANIFEST).exists()
        real = out.resolve()
        self.folder = real.with_name(f".{real.name}.building") if served else out
        self._places = dict.fromkeys([self.folder, out])
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
        """Where what is known of the checkpoints is kept."""
        return self.out / RECORDS / SOURCES

    def finished(self, file: StagedFile) -> Record | None:
        """The record of a file that need not be made again, here or in the bundle that is served."""
        for place in self._places:
            try:
                record = Record(**json.loads(_record_file(place, file.name).read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
            path = place / file.name
            if record.recipe == file.recipe and _intact(path, record):
                self._kept[file.name] = place
                return record
        return None

    def keep(self, name: str, record: Record) -> None:
        """Take a file of the served bundle as it is, by what its manifest says of it."""
        known = _record_file(self.out, name)
        if not known.is_file():
            known.parent.mkdir(parents=True, exist_ok=True)
            _write_json(known, asdict(record))
        self._kept[name] = self.out

    def begin(self) -> None:
        """Mark the folder as ours and unfinished, and bring there what is kept."""
        if self.replaces:
            self._begin_beside()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name, place in self._kept.items():
            if place != self.folder:
                _link(place / name, self.folder / name)
                _link(_record_file(place, name), _record_file(self.folder, name))

    def _begin_beside(self) -> None:
        if os.path.ismount(self.out):
            raise UserError(
                f"{self.out} holds a bundle and is a mounted disk, where a new one cannot take its place at once; "
                "give a folder below it as --out"
            )
        # its lock goes where the folder goes: after the exchange, both names are held
        self._held.close()
        self._held.enter_context(locked(self.folder))
        compiled, here = (place / RECORDS / "neuron" for place in (self.out, self.folder))
        if compiled.is_dir() and not here.exists():
            compiled.rename(here)
        if self.sources.exists():
            _link(self.sources, self.folder / RECORDS / SOURCES)

    def make(self, file: StagedFile) -> Record:
        """Make a file; it appears under its name only when it is complete."""
        self._changed = True
        path, record_file = self.folder / file.name, _record_file(self.folder, file.name)
        record_file.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        digest = file.write(temporary) or sha256_of(temporary)
        record = Record(file.recipe, digest, temporary.stat().st_size)
        _settle(temporary, path)
        _write_json(record_file, asdict(record))
        return record

    def finish(self, manifest: dict[str, Any], records: dict[str, Record]) -> None:
        """Drop what belongs to no record, write the manifest, last, and put the folder where it is served."""
        manifest = manifest | {"files": {name: asdict(r) for name, r in sorted(records.items())}}
        manifest["manifest_sha256"] = manifest_digest(manifest)
        changed = self._changed or any(place != self.out for place in self._kept.values())
        if not changed and self._current() == manifest:
            self._retire()
            return
        self.begin()
        _drop_strangers(self.folder, set(records))
        content = _as_json(manifest)
        parse_manifest(content, str(self.folder / MANIFEST), self.folder)
        _write_bytes(self.folder / MANIFEST, content)
        if self.replaces:
            exchange(self.folder, self.out.resolve())
            self._retire()

    def _retire(self) -> None:
        """Remove the bundle that was replaced; what a user laid into its folder goes on to the new one."""
        if not self.replaces or not self.folder.is_dir():
            return
        ours = {*FOLDERS, RECORDS, MANIFEST, SIGNATURE, STAMP, "model.pt", "neuron_config.json"}
        for path in self.folder.iterdir():
            if path.name not in ours and path.suffix != ".tmp" and not (self.out / path.name).exists():
                path.rename(self.out / path.name)
        shutil.rmtree(self.folder)

    def finish_copy(self, manifest: bytes, names: set[str]) -> None:
        """Write the manifest of a bundle whose files were copied here, last and as it was."""
        _drop_strangers(self.folder, names)
        shutil.rmtree(self.folder / RECORDS)
        _write_bytes(self.folder / MANIFEST, manifest)

    def release(self) -> None:
        """Let others build here."""
        self._held.close()

    def _current(self) -> Any:
        try:
            return json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None


@contextlib.contextmanager
def staged(out: Path, beside: bool = True) -> Iterator[Staging]:
    """A folder to build in, held against other builders; UserError if it is a stranger's or held.

    With `beside` False a bundle that is there is mended in its place.
    """
    recover(out.absolute())
    Staging(out, beside)
    with locked(out):
        # what is there is known only now that nobody else changes it
        staging = Staging(out, beside)
        try:
            yield staging
        finally:
            staging.release()


def _intact(file: Path, record: Record) -> bool:
    return file.is_file() and file.stat().st_size == record.bytes and sha256_of(file) == record.sha256


def _link(source: Path, target: Path) -> None:
    """The same bytes under a second name; a copy where links are not to be had."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _drop_strangers(folder: Path, names: set[str]) -> None:
    known = {_record_file(folder, name) for name in names}
    for record_file in (folder / RECORDS).glob("*.json"):
        if record_file not in known:
            record_file.unlink()
    if "model.pt" not in names:
        (folder / "model.pt").unlink(missing_ok=True)
    for below in FOLDERS:
        for file in (folder / below).glob("*"):
            if f"{below}/{file.name}" not in names:
                file.unlink()


def _record_file(folder: Path, name: str) -> Path:
    return folder / RECORDS / (canonical_hash(name)[:16] + ".json")


def _settle(temporary: Path, final: Path) -> None:
    """Force a file's bytes to disk and give it its name."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(final)


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _write_json(file: Path, value: Any) -> None:
    _write_bytes(file, _as_json(value))


def _write_bytes(file: Path, content: bytes) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(content)
    _settle(temporary, file)
