"""Where bundles are stored: a folder, such as a mounted bucket, or an S3 bucket. Both take whole objects only."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from model.errors import UserError
from trnspec.bundle.opening import ProgressFn, open_regular

SCHEME = "s3://"
_CHUNK = 8 << 20


class Remote(Protocol):
    """Objects by key, relative to the address that the remote was opened with."""

    def size(self, key: str) -> int | None:
        """The bytes of an object; None without one."""

    def get(self, key: str, size: int, write: Callable[[bytes], object], on_progress: ProgressFn) -> None:
        """Pass the bytes of an object of this size to `write`, in order."""

    def put(self, source: Path | bytes, key: str, on_progress: ProgressFn) -> None:
        """Copy a file or bytes to a key; the object appears when it is complete."""

    def put_new(self, key: str, content: bytes) -> bool:
        """Write a small object unless the key is taken; whether it was written."""

    def keys(self) -> Iterator[str]:
        """All keys."""


class Folder:
    """A folder as a remote: a file is written once, from its start to its end, under its name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def size(self, key: str) -> int | None:
        file = self.root / key
        return file.stat().st_size if file.is_file() else None

    def get(self, key: str, size: int, write: Callable[[bytes], object], on_progress: ProgressFn) -> None:
        with open_regular(self.root / key) as file:
            while size > 0 and (piece := file.read(min(_CHUNK, size))):
                write(piece)
                size -= len(piece)
                on_progress(len(piece))

    def put(self, source: Path | bytes, key: str, on_progress: ProgressFn) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        # half written by a killed run: a mounted bucket can drop a file, but not write over it
        target.unlink(missing_ok=True)
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as read, target.open("xb") as out:
            while piece := read.read(_CHUNK):
                out.write(piece)
                on_progress(len(piece))

    def put_new(self, key: str, content: bytes) -> bool:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and target.stat().st_size < len(content) and content.startswith(target.read_bytes()):
            # the beginning that a killed run wrote
            target.unlink()
        try:
            with target.open("xb") as out:
                out.write(content)
        except FileExistsError:
            return False
        return True

    def keys(self) -> Iterator[str]:
        if not self.root.is_dir():
            raise UserError(f"{self.root} is no folder; give s3://bucket/prefix or a folder that is there")
        for file in sorted(self.root.rglob("*")):
            if file.is_file():
                yield file.relative_to(self.root).as_posix()


def open_remote(address: str) -> Remote:
    """The remote of s3://bucket/prefix, if boto3 is installed, or of a folder."""
    if address.startswith(SCHEME):
        bucket, _, prefix = address[len(SCHEME) :].partition("/")
        if not bucket:
            raise UserError(f"{address} names no bucket; give s3://bucket/prefix")
        try:
            # boto3 is an optional dependency
            from compile.bundle.s3 import S3  # noqa: PLC0415
        except ImportError:
            raise UserError("boto3 is missing and s3:// addresses need it; run pip install 'trnspec[s3]'") from None
        return S3(bucket, prefix.strip("/"))
    if "://" in address or address.startswith("s3:"):
        raise UserError(f"{address} is neither s3://bucket/prefix nor a folder; give one of them")
    return Folder(Path(address))
