"""`python -m compile.store push|pull|ls|verify|sign`: bundles in S3 or in a folder.

A bundle at s3://bucket/team/name is its manifest, s3://bucket/team/name/manifest.json; its files are
s3://bucket/team/objects/<sha256>. The manifest is written last, so a bundle exists when its manifest does, and an
interrupted push or pull goes on with the files that are missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from compile.bundle.remote import Remote, open_remote
from compile.bundle.staging import free_space, staged, write_whole
from model.errors import UserError, guarded, run_cli
from model.progress import progress
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest, parse_manifest
from trnspec.bundle.opening import SIGNATURE_BYTES, Bundle, ProgressFn, damage, read_bundle
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of, sign

_WORKERS = 4


def split(address: str) -> tuple[str, str]:
    """The parent of a bundle's address, where objects are, and the bundle's name in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    if not parent or parent in ("s3:/", "s3:") or name in ("", ".", "..", "objects"):
        raise UserError(f"{address} does not name a bundle; give s3://bucket/folder/name or folder/name")
    return parent, name


def push(bundle: Path, address: str, public_key: str = "") -> str:
    """Copy a bundle to an address; returns the address. Objects that are there are not sent again.

    Raises UserError when the bundle is damaged, a different bundle or signature has the address, or the remote fails.
    """
    (parent, name), key = split(address), key_of(public_key)
    local, remote, manifest = _undamaged(bundle, key, "pushed"), open_remote(parent), f"{name}/{MANIFEST}"
    there = _small(remote, manifest, MANIFEST_BYTES)
    _refuse_another(there, local.content, address)
    signature = _new_signature(local, _small(remote, f"{name}/{SIGNATURE}", SIGNATURE_BYTES), key, address)

    def send(file: str, on_progress: ProgressFn) -> None:
        entry = local.files[file]
        if remote.size(_object(entry)) != entry.bytes:
            remote.put(bundle / file, _object(entry), on_progress)
            if remote.size(_object(entry)) != entry.bytes:
                raise UserError(f"{address}: {file} did not arrive whole; the same command goes on from here")

    # files of equal content are one object
    _each({entry.sha256: file for file, entry in local.files.items()}.values(), send, local.files, f"pushing {address}")
    if signature:
        remote.put(signature, f"{name}/{SIGNATURE}", lambda count: None)
    if there != local.content and not remote.put_new(manifest, local.content):
        _refuse_another(_small(remote, manifest, MANIFEST_BYTES), local.content, address)
    return address


def pull(address: str, out: Path, public_key: str = "") -> Path:
    """Copy a bundle to a local folder, where it appears when every digest is right.

    Raises UserError when there is no bundle, its signature is not the key's (if one is required), the folder has a
    different bundle, a byte is wrong, or the remote fails.
    """
    parent, key = split(address)[0], key_of(public_key)
    remote, content, manifest, signature = _stored(address, key)
    local = _local(out)
    if local and local.manifest.digest != manifest.digest:
        raise UserError(f"{out} holds a different bundle; pull into a different folder")
    with staged(out) as staging:
        missing = sorted(name for name, entry in manifest.files.items() if not staging.take(name, entry))
        free_space(out.absolute(), sum(manifest.files[name].bytes for name in missing))

        def fetch(name: str, on_progress: ProgressFn) -> None:
            entry, digest = manifest.files[name], hashlib.sha256()
            size, path = remote.size(_object(entry)), staging.temporary(name)
            if size is None:
                raise UserError(f"{address}: {name} is gone; push the bundle again")
            if size == entry.bytes:
                with path.open("xb") as file:
                    remote.get(
                        _object(entry), size, lambda piece: (digest.update(piece), file.write(piece)), on_progress
                    )
            if size != entry.bytes or digest.hexdigest() != entry.sha256:
                raise UserError(
                    f"{address}: {name} did not arrive as it was built (its size or sha256 differs); "
                    f"pull again, and if it stays so, {_mended(parent, entry)}"
                )
            staging.settle(name)

        _each(missing, fetch, manifest.files, f"pulling {address}")
        # an existing signature stays, unless the new one was checked
        staging.finish(content, signature if key or not local or not local.signature else local.signature)
    return out


def verify(address: str, public_key: str = "") -> list[str]:
    """One sentence for each object of a bundle that is missing, or whose size or content is wrong.

    Every byte is read. The signature is checked too if a key is given.
    """
    remote, _, manifest, _ = _stored(address, key_of(public_key))
    found, parent = list[str](), split(address)[0]

    def check(name: str, on_progress: ProgressFn) -> None:
        entry, digest = manifest.files[name], hashlib.sha256()
        size = remote.size(_object(entry))
        if size != entry.bytes:
            is_ = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            found.append(f"{name} {is_}; push the bundle again")
            return
        remote.get(_object(entry), size, digest.update, on_progress)
        if digest.hexdigest() != entry.sha256:
            found.append(f"{name} does not hold the bytes that were pushed; {_mended(parent, entry)}")

    _each(sorted(manifest.files), check, manifest.files, f"verifying {address}")
    return sorted(found)


def sign_bundle(bundle: Path, key_file: Path) -> Path:
    """Sign a bundle by minisign's secret key; returns the signature's file. UserError for a damaged one."""
    local = _undamaged(bundle, "", "signed")
    write_whole(bundle / SIGNATURE, sign(local.content, bundle.resolve().name, key_file))
    return bundle / SIGNATURE


def bundles(address: str) -> list[dict[str, Any]]:
    """The bundles stored below an address: one row each; a row with `error` names the fault of a manifest."""
    if not address.strip("/"):
        raise UserError("the address is empty; give s3://bucket/folder or a folder")
    remote = open_remote(address.rstrip("/"))
    return [_row(remote, key) for key in remote.keys() if key.endswith(f"/{MANIFEST}")]  # noqa: SIM118


def _row(remote: Remote, key: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": key[: -len(MANIFEST) - 1]}
    try:
        manifest = parse_manifest(_small(remote, key, MANIFEST_BYTES) or b"", key)
    except UserError as error:
        return row | {"error": str(error)}
    row |= {name: getattr(manifest.plan.spec, name) for name in ("target", "draft", "tp", "k")}
    return row | {"bytes": sum(e.bytes for e in manifest.files.values()), "neff": manifest.compiler.neff}


def _object(entry: File) -> str:
    return f"objects/{entry.sha256}"


def _mended(parent: str, entry: File) -> str:
    return f"delete {parent}/{_object(entry)} and push the bundle again"


def _small(remote: Remote, key: str, most: int) -> bytes | None:
    """The bytes of a small object, if there is one."""
    content = bytearray()
    if (size := remote.size(key)) is None:
        return None
    if size > most:
        raise UserError(f"{key} has {size} bytes, more than any that a push writes; delete it and push again")
    remote.get(key, size, content.extend, lambda count: None)
    return bytes(content)


def _stored(address: str, key: str) -> tuple[Remote, bytes, Manifest, bytes | None]:
    """A stored bundle: its remote, its manifest's bytes, the manifest, and its signature, checked if a key is given."""
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


def _local(out: Path) -> Bundle | None:
    # a damaged manifest is mended by a pull of the same bundle
    try:
        return read_bundle(out, key="") if out.is_dir() else None
    except UserError:
        return None


def _new_signature(local: Bundle, theirs: bytes | None, key: str, address: str) -> bytes | None:
    """A signature that the store lacks. One that is stored is not replaced by an unchecked one."""
    ours, file = local.signature, local.path / SIGNATURE
    if ours is None or ours == theirs:
        return None
    if not key and theirs is not None:
        raise UserError(
            f"{address} has a different signature, which is not replaced unseen; give --public-key with the key of "
            f"yours, or take {file} away"
        )
    if not key and not ours.startswith(b"untrusted comment:"):
        raise UserError(f"{file} is not a signature of minisign; sign the bundle again, or take it away")
    return ours


def _refuse_another(there: bytes | None, ours: bytes, address: str) -> None:
    # a killed push leaves the beginning of our own manifest in a folder
    if there is None or ours.startswith(there):
        return
    if not there.lstrip().startswith(b"{"):
        raise UserError(
            f"{address}/{MANIFEST} is no manifest (it begins with {shown(there[:20].decode('latin-1'))}): if a proxy "
            "or a login page answered, log in and run the same command; else push to a different name"
        )
    raise UserError(f"{address} holds a different bundle, which is never overwritten; push to a different name")


def _each(names: Iterable[str], work: Callable[[str, ProgressFn], None], files: dict[str, File], what: str) -> None:
    """Run the work for every file, a few at a time; the first error ends the rest."""
    names = list(names)
    total = sum(files[name].bytes for name in names)
    with progress(what, total, "bytes") as task, concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        running = [pool.submit(work, name, task.advance) for name in names]
        try:
            for done in concurrent.futures.as_completed(running):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m compile.store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, *words in (("push", "bundle", "address"), ("pull", "address", "out"), ("ls", "address"),
                         ("verify", "address"), ("sign", "bundle")):  # fmt: skip
        command = commands.add_parser(name)
        for word in words:
            text = "s3://bucket/folder/name, or a folder" if word == "address" else "local folder"
            command.add_argument(word, type=str if word == "address" else Path, help=text)
        if name in ("ls", "verify"):
            command.add_argument("--json", action="store_true", help="print JSON")
        if name in ("push", "pull", "verify"):
            command.add_argument("--public-key", default="", help="refuse bundles not signed by this key")
        if name == "sign":
            command.add_argument("--key", type=Path, required=True, help="minisign's secret key file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Push, pull, list, verify or sign; the last line of stdout is the address or the folder."""
    options = _options(arguments)
    place = next(str(getattr(options, name)) for name in ("out", "address", "bundle") if hasattr(options, name))
    guarded(lambda: _run(options), place)


def _run(options: argparse.Namespace) -> None:
    if options.command == "push":
        print(push(options.bundle, options.address, options.public_key))
    elif options.command == "pull":
        print(pull(options.address, options.out, options.public_key))
    elif options.command == "sign":
        print(sign_bundle(options.bundle, options.key))
        print("signed: the key's owner vouches for the content, whatever the folder is called", file=sys.stderr)
    elif options.command == "ls":
        rows = bundles(options.address)
        print(json.dumps(rows, indent=1) if options.json else "\n".join(map(_line, rows)) or "no bundle")
        raise SystemExit(int(any("error" in row for row in rows)))
    else:
        found = verify(options.address, options.public_key)
        good = f"{options.address}: every object is as it was pushed"
        print(json.dumps(found) if options.json else "\n".join(found) or good)
        raise SystemExit(int(bool(found)))


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{ascii(row['name'])[1:-1]:<40} unusable: {row['error']}"
    pair, size = f"{row['target']} + {row['draft']}", row["bytes"] / 1e9
    return f"{row['name']:<40} {pair:<36} tp {row['tp']:<3} k {row['k']:<3} {size:8.2f} GB  neff {row['neff']}"


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
