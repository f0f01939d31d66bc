"""Writing a bundle: each file whole or absent, the manifest last, an interrupted build resumed.

`.build/` holds one small record per finished file: the recipe (the hash of what made it), its
digest and its size. A file whose record has the wanted recipe and whose digest still holds is not
made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.bundle.manifest import FORMAT, MANIFEST, canonical_hash, manifest_digest, sha256_of
from model.errors import UserError

_RECORDS = ".build"


@dataclass(frozen=True)
class Artifact:
    """A file to make: its name in the bundle, the hash of what makes it, and how."""

    name: str
    recipe: str
    write: Callable[[Path], None]


@dataclass(frozen=True)
class Record:
    """What is known of a finished file."""

    recipe: str
    sha256: str
    bytes: int


class Staging:
    """An output folder under construction."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._records = out / _RECORDS
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file; give a folder as --out")
        if out.is_dir() and any(out.iterdir()) and not self._ours():
            raise UserError(f"{out} is not empty and holds no bundle; give an empty or new folder as --out")

    def _ours(self) -> bool:
        if self._records.is_dir():
            return True
        try:
            return bool(json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finished(self, artifact: Artifact) -> Record | None:
        """The record of a file that need not be made again."""
        try:
            record = Record(**json.loads(self._record_file(artifact.name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        file = self.out / artifact.name
        intact = file.is_file() and file.stat().st_size == record.bytes and sha256_of(file) == record.sha256
        return record if intact and record.recipe == artifact.recipe else None

    def make(self, artifact: Artifact) -> Record:
        """Make a file; it appears under its name only when it is complete."""
        self.begin()
        file, record_file = self.out / artifact.name, self._record_file(artifact.name)
        record_file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".tmp")
        artifact.write(temporary)
        record = Record(artifact.recipe, sha256_of(temporary), temporary.stat().st_size)
        _settle(temporary, file)
        _write_json(record_file, asdict(record))
        return record

    def begin(self) -> None:
        """Mark the folder as ours and unfinished: from here until the end there is no manifest."""
        self._records.mkdir(parents=True, exist_ok=True)
        (self.out / MANIFEST).unlink(missing_ok=True)

    def finish(self, manifest: dict[str, Any], records: dict[str, Record]) -> None:
        """Drop what belongs to no record and write the manifest, atomically and last."""
        manifest = manifest | {"files": {name: asdict(r) for name, r in sorted(records.items())}}
        manifest["manifest_sha256"] = manifest_digest(manifest)
        if self._current() == manifest:
            return
        self.begin()
        self._drop_strangers(set(records))
        _write_json(self.out / MANIFEST, manifest)

    def finish_copy(self, manifest: bytes, names: set[str]) -> None:
        """Write the manifest of a bundle whose files were copied here, last and as it was."""
        if self._records.is_dir():
            self._drop_strangers(names)
            shutil.rmtree(self._records)
        _write_bytes(self.out / MANIFEST, manifest)

    def _current(self) -> Any:
        try:
            return json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _drop_strangers(self, names: set[str]) -> None:
        known = {self._record_file(name) for name in names}
        for record_file in self._records.glob("*.json"):
            if record_file not in known:
                record_file.unlink()
        if "model.pt" not in names:
            (self.out / "model.pt").unlink(missing_ok=True)
        for folder in ("hlo", "neff", "logs", "weights", "tokenizer"):
            for file in (self.out / folder).glob("*"):
                if f"{folder}/{file.name}" not in names:
                    file.unlink()

    def _record_file(self, name: str) -> Path:
        return self._records / (canonical_hash(name)[:16] + ".json")


def _settle(temporary: Path, final: Path) -> None:
    """Force a file's bytes to disk and give it its name."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(final)


def _write_json(file: Path, value: Any) -> None:
    _write_bytes(file, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def _write_bytes(file: Path, content: bytes) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(content)
    _settle(temporary, file)
