"""Where bundles are kept away from this machine: an S3 bucket, or a folder such as a mounted bucket.

Both serve whole objects only: no rename, no append, no change in place. Credentials come
from the standard AWS chain alone and never appear in a message.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from model.errors import UserError
from trnspec.bundle.manifest import MANIFEST_BYTES, sha256_of

Told = Callable[[int], None]
SCHEME = "s3://"
_CHUNK = 8 << 20


class Remote(Protocol):
    """Objects by key; keys are relative to the address that the remote was made for."""

    def size(self, key: str) -> int | None:
        """The bytes of an object, or None where there is none."""

    def get(self, key: str, file: Path, told: Told) -> None:
        """Copy an object into a new file."""

    def put(self, file: Path, key: str, told: Told) -> None:
        """Copy a file to a key; the object appears when it is whole."""

    def read(self, key: str) -> bytes | None:
        """A small object, or None where there is none; of a large one the beginning, longer than any manifest."""

    def sha256(self, key: str, told: Told) -> str | None:
        """The digest of an object's bytes as they are there now, or None where there is none."""

    def put_new(self, key: str, content: bytes) -> bool:
        """Write a small object unless the key is taken; whether it was written."""

    def listing(self) -> Iterator[str]:
        """All keys."""


class Folder:
    """A folder as a remote. Files are written from the start to the end, once, under their own name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def size(self, key: str) -> int | None:
        file = self.root / key
        return file.stat().st_size if file.is_file() else None

    def get(self, key: str, file: Path, told: Told) -> None:
        _copy(self.root / key, file, told)

    def put(self, file: Path, key: str, told: Told) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(file, target, told)

    def read(self, key: str) -> bytes | None:
        file = self.root / key
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            return opened.read(MANIFEST_BYTES + 1)

    def sha256(self, key: str, told: Told) -> str | None:
        file = self.root / key
        return sha256_of(file, told) if file.is_file() else None

    def put_new(self, key: str, content: bytes) -> bool:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        there = self.read(key)
        if there is not None and there != content and content.startswith(there):
            # the rest of the same object from a killed run
            target.unlink()
        try:
            with target.open("xb") as out:
                out.write(content)
        except FileExistsError:
            return False
        return True

    def listing(self) -> Iterator[str]:
        if not self.root.is_dir():
            raise UserError(f"{self.root} is no folder; give s3://bucket/prefix or a folder that is there")
        for file in sorted(self.root.rglob("*")):
            if file.is_file():
                yield file.relative_to(self.root).as_posix()


def _copy(source: Path, target: Path, told: Told) -> None:
    # half written by a killed run: a mounted bucket can drop a file, but not write over it
    target.unlink(missing_ok=True)
    with source.open("rb") as read, target.open("xb") as write:
        while piece := read.read(_CHUNK):
            write.write(piece)
            told(len(piece))


def open_remote(address: str) -> Remote:
    """The remote of s3://bucket/prefix, where boto3 is, or of a folder."""
    if address.startswith(SCHEME):
        bucket, _, prefix = address[len(SCHEME) :].partition("/")
        if not bucket:
            raise UserError(f"{address} names no bucket; give s3://bucket/prefix")
        try:
            # vendor seam: boto3 is an extra
            from compile.bundle.s3 import S3  # noqa: PLC0415
        except ImportError:
            raise UserError("boto3 is missing and s3:// addresses need it; run pip install 'trnspec[s3]'") from None
        return S3(bucket, prefix.strip("/"))
    if "://" in address or address.startswith("s3:"):
        raise UserError(f"{address} is neither s3://bucket/prefix nor a folder; give one of them")
    return Folder(Path(address))


def free_space(folder: Path, needed: int) -> None:
    """Refuse before any byte is moved when a folder's disk cannot hold them."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{_size(needed)} are needed and {folder} has {_size(free)} free, {_size(needed - free)} too little; "
            "free some space or choose a different folder"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
