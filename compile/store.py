"""`python -m compile.store push|pull|ls|verify|sign`: bundles in S3 or in a folder.

A bundle at s3://bucket/team/name is its manifest, s3://bucket/team/name/manifest.json; its files are
s3://bucket/team/objects/<sha256>. The manifest is written last, so a bundle exists when its manifest does, and an
interrupted push or pull goes on with the files that are missing.
"""

import argparse
import concurrent.futures
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile.bundle.remote import Remote, open_remote
from compile.bundle.staging import staged, write_whole
from model.errors import UserError, guarded, run_cli
from model.progress import progress
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest, parse_manifest
from trnspec.bundle.opening import SIGNATURE_BYTES, Bundle, damage, read_bundle
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of, sign

_WORKERS = 4
# files by their digests
OBJECTS = "objects/"


def push(bundle: Path, address: str, public_key: str = "") -> str:
    """Copy a bundle to an address; returns the address. Objects that are there are not sent again.

    Raises UserError when the bundle is damaged, a different bundle or signature has the address, or the remote fails.
    """
    (parent, name), key = split(address), key_of(public_key)
    local, remote, manifest = _undamaged(bundle, key, "pushed"), open_remote(parent), f"{name}/{MANIFEST}"
    there = _small(remote, manifest, MANIFEST_BYTES)
    _refuse_another(there, local.content, address)
    ours, theirs = local.signature, _small(remote, f"{name}/{SIGNATURE}", SIGNATURE_BYTES)
    if not key and ours not in (None, theirs) and (theirs or not ours.startswith(b"untrusted comment:")):
        raise UserError(
            f"{bundle / SIGNATURE} is not the signature that {address} has, or is none of minisign; give --public-key "
            "with its key, or take it away"
        )

    def send(file: str, entry: File) -> None:
        if remote.size(key := OBJECTS + entry.sha256) != entry.bytes:
            remote.put(bundle / file, key)

    # files of equal content are one object
    unique = {entry.sha256: (file, entry) for file, entry in local.files.items()}
    _each(dict(unique.values()), send, f"pushing {address}")
    if ours and ours != theirs:
        remote.put(ours, f"{name}/{SIGNATURE}")
    if there != local.content and not remote.put_new(manifest, local.content):
        _refuse_another(_small(remote, manifest, MANIFEST_BYTES), local.content, address)
    return address


def pull(address: str, out: Path, public_key: str = "") -> Path:
    """Copy a bundle to a local folder, where it appears when every digest is right.

    Raises UserError when there is no bundle, its signature is not the key's (if one is required), the folder has a
    different bundle, a byte is wrong, or the remote fails.
    """
    key = key_of(public_key)
    remote, content, manifest, signature = _stored(address, key)
    try:
        local = read_bundle(out, key="") if out.is_dir() else None
    except UserError:
        # a damaged manifest is mended by a pull of the same bundle
        local = None
    if local and local.manifest.digest != manifest.digest:
        raise UserError(f"{out} holds a different bundle; pull into a different folder")
    with staged(out) as staging:
        missing = {name: entry for name, entry in manifest.files.items() if not staging.take(name, entry)}
        staging.check_space(sum(entry.bytes for entry in missing.values()))

        def fetch(name: str, entry: File) -> None:
            with staging.temporary(name).open("xb") as file:
                clause = _receive(remote, entry, file.write)
            if clause:
                raise UserError(f"{address}: {name} {clause}")
            staging.settle(name)

        _each(missing, fetch, f"pulling {address}")
        # an existing signature stays, unless the new one was checked
        staging.finish(content, signature if key or not local or not local.signature else local.signature)
    return out


def verify(address: str, public_key: str = "") -> list[str]:
    """One sentence for each object of a bundle that is missing, or whose size or content is wrong; every byte is read.

    The signature is checked too if a key is given.
    """
    remote, _, manifest, _ = _stored(address, key_of(public_key))
    found = list[str]()

    def check(name: str, entry: File) -> None:
        if clause := _receive(remote, entry, len):
            found.append(f"{name} {clause}")

    _each(manifest.files, check, f"verifying {address}")
    return sorted(found)


def sign_bundle(bundle: Path, key: Path) -> Path:
    """Sign a bundle by minisign's secret key; returns the signature's file. UserError for a damaged one."""
    local = _undamaged(bundle, "", "signed")
    write_whole(bundle / SIGNATURE, sign(local.content, bundle.resolve().name, key))
    return bundle / SIGNATURE


def bundles(address: str) -> dict[str, Manifest | UserError]:
    """The bundles stored below an address: name -> manifest, or what is wrong with it."""
    remote, found = open_remote(address.rstrip("/") or "no address"), dict[str, Manifest | UserError]()
    for key in (key for key in remote.keys() if key.endswith(f"/{MANIFEST}")):  # noqa: SIM118
        name = key[: -len(MANIFEST) - 1]
        try:
            found[name] = parse_manifest(_small(remote, key, MANIFEST_BYTES) or b"", key)
        except UserError as error:
            found[name] = error
    return found


def split(address: str) -> tuple[str, str]:
    """The parent of a bundle's address, where objects are, and the bundle's name in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    if not parent or parent in ("s3:/", "s3:") or name in ("", ".", "..", "objects"):
        raise UserError(f"{address} does not name a bundle; give s3://bucket/folder/name or folder/name")
    return parent, name


def _receive(remote: Remote, entry: File, write: Callable[[bytes], object]) -> str:
    """Pass the bytes of an object to `write`. Returns how it differs from its entry, as the end of a sentence."""
    key, digest = OBJECTS + entry.sha256, hashlib.sha256()
    size = remote.size(key)
    if size != entry.bytes:
        return f"{'is gone' if size is None else f'has {size} bytes, not {entry.bytes}'}; push the bundle again"

    def both(piece: bytes) -> None:
        digest.update(piece)
        write(piece)

    remote.get(key, size, both)
    if digest.hexdigest() == entry.sha256:
        return ""
    return (
        "did not arrive as it was built (its sha256 differs); try again, and if it stays so, delete "
        f"{remote.address}/{key} and push the bundle again"
    )


def _small(remote: Remote, key: str, most: int) -> bytes | None:
    """The bytes of a small object, if there is one."""
    content = bytearray()
    if (size := remote.size(key)) is None:
        return None
    if size > most:
        raise UserError(f"{remote.address}/{key} has {size} bytes, no push writes so many; delete it and push again")
    remote.get(key, size, content.extend)
    return bytes(content)


def _stored(address: str, key: str) -> tuple[Remote, bytes, Manifest, bytes | None]:
    """A stored bundle: its remote, its manifest as bytes and parsed, and its signature, checked if a key is given."""
    parent, name = split(address)
    remote = open_remote(parent)
    content = _small(remote, f"{name}/{MANIFEST}", MANIFEST_BYTES)
    if content is None:
        raise UserError(f"{address} holds no bundle, or its push did not finish; push it again or correct the address")
    signature = _small(remote, f"{name}/{SIGNATURE}", SIGNATURE_BYTES)
    if key:
        check_signature(content, signature, key, address)
    return remote, content, parse_manifest(content, f"{address}/{MANIFEST}"), signature


def _undamaged(bundle: Path, key: str, done: str) -> Bundle:
    local = read_bundle(bundle, key)
    if found := damage(local):
        raise UserError(f"{bundle} is damaged: {found[0]}; build it again before it is {done}")
    return local


def _refuse_another(there: bytes | None, ours: bytes, address: str) -> None:
    # a killed push leaves the beginning of our own manifest in a folder
    if there is not None and not ours.startswith(there):
        begins = shown(there[:20].decode("latin-1"))
        raise UserError(
            f"{address} holds a different bundle, or a proxy answered (it begins with {begins}); log in, or push to a "
            "different name"
        )


def _each(files: dict[str, File], work: Callable[[str, File], None], what: str) -> None:
    """Run the work for every file, a few at a time; the first error ends the rest."""
    total = sum(entry.bytes for entry in files.values())
    with progress(what, total, "bytes") as task, concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        running = {pool.submit(work, *item): item[1].bytes for item in files.items()}
        try:
            for done in concurrent.futures.as_completed(running):
                done.result()
                task.advance(running[done])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_COMMANDS: dict[str, Callable[..., Any]] = {
    "push": push, "pull": pull, "ls": bundles, "verify": verify, "sign": sign_bundle,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Push, pull, list, verify or sign; the last line of stdout is the address or the folder."""
    parser = argparse.ArgumentParser(prog="python -m compile.store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    words = {"push": "bundle address", "pull": "address out", "ls": "address", "verify": "address", "sign": "bundle"}
    for name, places in words.items():
        command = commands.add_parser(name)
        for place in places.split():
            kind = str if place == "address" else Path
            command.add_argument(place, type=kind, help="s3://bucket/folder/name, or a folder")
        if name in ("push", "pull", "verify"):
            command.add_argument("--public-key", default="", help="refuse bundles not signed by this key")
    commands.choices["sign"].add_argument("--key", type=Path, required=True, help="minisign's secret key file")
    given = vars(parser.parse_args(arguments))
    name = given.pop("command")
    found, lines = guarded(lambda: _COMMANDS[name](**given), str(given[words[name].split()[-1]])), list[str]()
    if name == "ls":
        lines = [f"{ascii(n)[1:-1]:<40} {m if isinstance(m, Manifest) else f'unusable: {m}'}" for n, m in found.items()]
    elif name == "verify":
        lines = found or [f"{given['address']}: every object is as it was pushed"]
    else:
        lines = [str(found)]
    print(*lines, sep="\n", end="\n" * bool(lines))
    if (name == "verify" and found) or (name == "ls" and any(isinstance(m, UserError) for m in found.values())):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
