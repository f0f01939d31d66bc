"""`open_bundle`: the one way to load a bundle. What is verified is what is used.

The folder is opened once, and every file below that very folder, without following links; a file is read whole, its
size and digest are held against the manifest, and its user gets the bytes that were hashed. So nothing can be
exchanged between the check and the use, and nothing is remembered from one load to the next.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from model.graph_spec import GraphSpec
from model.progress import progress
from trnspec.bundle.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest, parse_manifest
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of
from trnspec.bundle.spec import BundleSpec

_READERS = min(4, os.cpu_count() or 1)
_PIECE = 1 << 20
_SIGNATURE_BYTES = 1 << 16
Told = Callable[[int], None]
Look = Callable[[str, bytearray], Iterable[str]]


class _Folder:
    """An open folder; it is closed with the last bundle that refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path} is no folder that can be opened ({error.strerror}); give a bundle's") from error

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def open(self, name: str) -> int:
        """A descriptor of a regular file below the folder; OSError if a link or anything else is on the way."""
        *parents, last = name.split("/")
        at, held = self.fd, list[int]()
        try:
            for parent in parents:
                at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                held.append(at)
            # a pipe without a writer would wait forever
            found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            for fd in held:
                os.close(fd)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise OSError(errno.EINVAL, "is no regular file")
        return found

    def small(self, name: str, most: int) -> bytes | None:
        """The bytes of a small file, at most one more than `most`; None where there is none.

        UserError for anything that is no file.
        """
        try:
            fd = self.open(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{self.path / name} {_unreadable(error)}; copy the bundle again") from error
        with os.fdopen(fd, "rb") as file:
            return file.read(most + 1)


def _unreadable(error: OSError) -> str:
    return "is a link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest is checked, and each file is checked as it is read."""

    path: Path
    manifest: Manifest
    content: bytes
    _folder: _Folder

    @property
    def spec(self) -> BundleSpec:
        return self.manifest.spec

    @property
    def plan(self) -> BundlePlan:
        return self.manifest.plan

    @property
    def graphs(self) -> tuple[GraphSpec, ...]:
        return self.manifest.plan.graphs

    @property
    def files(self) -> dict[str, File]:
        return self.manifest.files

    def read(self, name: str, told: Told = lambda count: None) -> bytearray:
        """The bytes of a file; UserError if they are not those that the build wrote."""
        content, clause = self.checked(name, told)
        if clause:
            raise UserError(f"{self.path} is damaged: {name} {clause}; build the bundle again or copy it again")
        return content

    def checked(self, name: str, told: Told = lambda count: None) -> tuple[bytearray, str]:
        """A file's bytes, and how it differs from its entry in the manifest, as the end of a sentence; "" if not."""
        entry = self.files[name]
        try:
            fd = self._folder.open(name)
        except FileNotFoundError:
            return bytearray(), "is missing"
        except OSError as error:
            return bytearray(), _unreadable(error)
        with os.fdopen(fd, "rb", buffering=0) as file:
            if (size := os.fstat(fd).st_size) != entry.bytes:
                return bytearray(), f"has {size} bytes, the manifest says {entry.bytes}"
            content, digest, done = bytearray(size), hashlib.sha256(), 0
            view = memoryview(content)
            try:
                while done < size and (count := file.readinto(view[done : done + _PIECE])):
                    digest.update(view[done : done + count])
                    done += count
                    told(count)
            except OSError as error:
                return bytearray(), f"cannot be read ({error.strerror})"
        return (content, "") if digest.hexdigest() == entry.sha256 else (bytearray(), "does not match the manifest")

    def title(self, role: str) -> str:
        """A model's name for people, with its size where the name is a folder's, which may be any word."""
        return self.manifest.title(role)


def read_bundle(path: Path, key: str | None = None) -> Bundle:
    """A folder's bundle with its manifest checked, and its signature where a key is set; no file is read yet.

    `key` is the public key, "" for none, by default the environment's. UserError says why the folder is not a bundle
    of this version.
    """
    folder = _Folder(path)
    content = folder.small(MANIFEST, MANIFEST_BYTES)
    if content is None:
        raise UserError(
            f"{path} has no {MANIFEST}: it is not a bundle, or its build did not finish; "
            "run compile.build with the same --out to finish it"
        )
    if key := key_of() if key is None else key:
        check_signature(content, folder.small(SIGNATURE, _SIGNATURE_BYTES), key, str(path))
    return Bundle(path, parse_manifest(content, str(path / MANIFEST)), content, folder)


def unfinished(path: Path, manifest: Manifest, content: bytes) -> Bundle:
    """A folder that is to hold the bundle of a manifest from elsewhere; its files may be missing."""
    return Bundle(path, manifest, content, _Folder(path))


def open_bundle(path: Path) -> Bundle:
    """The bundle in a folder, every file of it checked but the weights, which are checked as they are loaded.

    UserError names the first file that does not match the manifest.
    """
    bundle = read_bundle(path)
    if sentences := damage(bundle, [name for name in bundle.files if not name.startswith("weights/")]):
        raise UserError(f"{path} is damaged: {sentences[0]}; build the bundle again or copy it again")
    return bundle


def _nothing(name: str, content: bytearray) -> Iterable[str]:
    return ()


def damage(bundle: Bundle, names: Collection[str] | None = None, look: Look = _nothing) -> list[str]:
    """One sentence for each of these files, or of all, that is missing, or whose size or content is wrong.

    `look` takes the name and the bytes of each other file, and may say more sentences.
    """
    files = sorted(bundle.files if names is None else names)
    total = sum(bundle.files[name].bytes for name in files)
    with progress(f"verifying {bundle.path}", total, "bytes") as task, ThreadPoolExecutor(_READERS) as pool:

        def of_file(name: str) -> list[str]:
            content, clause = bundle.checked(name, task.advance)
            return [f"{name} {clause}"] if clause else list(look(name, content))

        return [sentence for sentences in pool.map(of_file, files) for sentence in sentences]
