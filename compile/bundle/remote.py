"""Where bundles are stored: a folder, such as a mounted bucket, or an S3 bucket. Objects are written once."""

import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from model.errors import UserError
from trnspec.bundle.opening import open_regular

if TYPE_CHECKING:
    from compile.bundle.s3 import S3

SCHEME = "s3://"
_CHUNK = 8 << 20
Remote: TypeAlias = "Folder | S3"


class Folder:
    """Objects by key below a folder: a file is written once, sequentially, under its final name."""

    def __init__(self, address: str) -> None:
        self.address, self._root = address, Path(address)

    def size(self, key: str) -> int | None:
        """The size of an object in bytes; None if it does not exist."""
        file = self._root / key
        return file.stat().st_size if file.is_file() else None

    def get(self, key: str, size: int, write: Callable[[bytes], object]) -> None:
        """Pass the bytes of an object of this size to `write`, in order."""
        with open_regular(self._root / key) as file:
            while chunk := file.read(min(_CHUNK, size)):
                write(chunk)
                size -= len(chunk)

    def put(self, source: Path | bytes, key: str) -> None:
        """Copy a file or bytes to a key."""
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        # a killed run may have left a part of it: a mounted bucket can delete a file, but not overwrite it
        target.unlink(missing_ok=True)
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file, target.open("xb") as out:
            shutil.copyfileobj(file, out, _CHUNK)

    def put_new(self, key: str, content: bytes) -> bool:
        """Write a small object unless the key exists. Returns whether it was written."""
        target = self._root / key
        if target.is_file() and target.stat().st_size < len(content) and content.startswith(target.read_bytes()):
            # the beginning that a killed run wrote
            target.unlink()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                out.write(content)
        except FileExistsError:
            return False
        return True

    def keys(self) -> Iterable[str]:
        """All keys."""
        if not self._root.is_dir():
            raise UserError(f"{self._root} is not a folder; give an existing one, or s3://bucket/prefix")
        return (p.relative_to(self._root).as_posix() for p in sorted(self._root.rglob("*")) if p.is_file())


def open_remote(address: str) -> Remote:
    """The remote of a folder or, with boto3, of s3://bucket/prefix."""
    if not address.startswith(SCHEME):
        if "://" in address or address.startswith("s3:"):
            raise UserError(f"{address} is neither s3://bucket/prefix nor a folder; give one of them")
        return Folder(address)
    if not address[len(SCHEME) :].partition("/")[0]:
        raise UserError(f"{address} names no bucket; give s3://bucket/prefix")
    try:
        # boto3 is an optional dependency
        from compile.bundle.s3 import S3  # noqa: PLC0415
    except ImportError:
        raise UserError("boto3 is missing and s3:// addresses need it; run pip install 'trnspec[s3]'") from None
    return S3(address)
