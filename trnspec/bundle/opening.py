"""`open_bundle`, the way to load a bundle: a file is opened once, hashed while it is read, and used from those bytes.

Files are opened below the folder that was opened first: a folder that takes its name later is not read.
"""

import errno
import hashlib
import os
import stat
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from model.errors import UserError
from model.graph_spec import GraphSpec
from model.progress import progress
from trnspec.bundle.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest, parse_manifest
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of
from trnspec.bundle.spec import BundleSpec

SIGNATURE_BYTES = 1 << 16
_READERS = min(4, os.cpu_count() or 1)
_CHUNK = 1 << 20
# read and hashed by whoever uses them
_READ_WHERE_USED = ("weights/", "hlo/", "neff/")


def open_regular(name: str | Path, folder: int | None = None) -> BinaryIO:
    """Open a regular file, below an open folder if given; OSError for a link, a pipe or anything else."""
    # a pipe without a writer would block
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", str(name))
    return os.fdopen(fd, "rb")


def read_small(file: Path, limit: int, folder: int | None = None) -> bytes | None:
    """The bytes of a file, of its name below an open folder if given, at most one more than `limit`; None without one.

    UserError if it is no regular file.
    """
    try:
        with open_regular(file if folder is None else file.name, folder) as opened:
            return opened.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} {_unreadable(error)}; copy the bundle again") from error


def _unreadable(error: OSError) -> str:
    return "is a link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest is checked, each file is checked when it is read."""

    path: Path
    manifest: Manifest
    files: dict[str, File]
    plan: BundlePlan
    graphs: tuple[GraphSpec, ...]
    spec: BundleSpec
    content: bytes
    signature: bytes | None
    folder: int

    def read(self, name: str) -> bytearray:
        """The bytes of a file; UserError if they are not those that the build wrote."""
        clause, content = self.check(name, keep=True)
        if clause:
            raise UserError(f"{self.path} is corrupt: {name} {clause}; build the bundle again or copy it again")
        return content

    def check(self, name: str, keep: bool = False) -> tuple[str, bytearray]:
        """Read a file. Returns how it differs from the manifest, as the end of a sentence, and its bytes to `keep`."""
        entry, digest, content = self.files[name], hashlib.sha256(), bytearray()
        try:
            with open_regular(name, self.folder) as file:
                if (left := os.fstat(file.fileno()).st_size) != entry.bytes:
                    return f"has {left} bytes, the manifest says {entry.bytes}", content
                while chunk := file.read(min(_CHUNK, left)):
                    digest.update(chunk)
                    content += chunk if keep else b""
                    left -= len(chunk)
        except FileNotFoundError:
            return "is missing", content
        except OSError as error:
            return _unreadable(error), content
        return "" if digest.hexdigest() == entry.sha256 else "does not match the manifest", content


def read_bundle(path: Path, key: str | None = None) -> Bundle:
    """A folder's bundle with its manifest checked, and its signature if a key is set; no other file is read yet.

    `key`: the public key, "" for none, by default the environment's. UserError says why it is no bundle.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as a folder ({error.strerror}); give a bundle's") from error
    try:
        content = read_small(path / MANIFEST, MANIFEST_BYTES, folder)
        if content is None:
            raise UserError(f"{path} has no {MANIFEST}: it is not a bundle; give a folder that compile.build wrote")
        signature = read_small(path / SIGNATURE, SIGNATURE_BYTES, folder)
        if key := key_of() if key is None else key:
            check_signature(content, signature, key, str(path))
        manifest = parse_manifest(content, str(path / MANIFEST))
        files, plan = manifest.files, manifest.plan
        bundle = Bundle(path, manifest, files, plan, plan.graphs, plan.spec, content, signature, folder)
    except BaseException:
        os.close(folder)
        raise
    weakref.finalize(bundle, os.close, folder)
    return bundle


def open_bundle(path: Path) -> Bundle:
    """A folder's bundle, its files checked but those that whoever uses them checks: weights, graphs, NEFFs.

    UserError names the first file that does not match the manifest.
    """
    bundle = read_bundle(path)
    if faults := corrupt_files(bundle, [name for name in bundle.files if not name.startswith(_READ_WHERE_USED)]):
        raise UserError(f"{path} is corrupt: {faults[0]}; build the bundle again or copy it again")
    return bundle


def corrupt_files(bundle: Bundle, names: Iterable[str] | None = None) -> list[str]:
    """A sentence for each of these files, by default all, that is missing, or whose size or content is wrong."""
    files = sorted(bundle.files if names is None else names)
    total = sum(bundle.files[name].bytes for name in files)
    with progress(f"verifying {bundle.path}", total, "bytes") as task, ThreadPoolExecutor(_READERS) as pool:

        def clause(name: str) -> str:
            fault = bundle.check(name)[0]
            task.advance(bundle.files[name].bytes)
            return fault

        return [f"{name} {fault}" for name, fault in zip(files, pool.map(clause, files), strict=True) if fault]
