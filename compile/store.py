"""`python -m compile.store push|pull|ls|verify|sign`: bundles in S3, by content, the manifest last.

A bundle at s3://bucket/team/name is its manifest, s3://bucket/team/name/manifest.json; its files
are s3://bucket/team/objects/<sha256>, shared with every bundle of the same team. So equal files
are stored once, an interrupted push or pull goes on where it stopped, and a bundle exists only once its
manifest does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile.bundle.own import own_folder, write_whole
from compile.bundle.remote import Remote, Told, free_space, open_remote
from compile.bundle.staging import Staging, staged
from model.errors import UserError, guarded, run_cli
from model.progress import progress
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST, File, Manifest, parse_manifest, sha256_of
from trnspec.bundle.opening import Bundle, damage, read_bundle, unfinished
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of, sign

_WORKERS = 4


def split(address: str) -> tuple[str, str]:
    """The parent of a bundle's address, where objects are shared, and the bundle's name in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    if not parent or parent in ("s3:/", "s3:") or name in ("", ".", "..", "objects"):
        raise UserError(f"{address} does not name a bundle; give s3://bucket/folder/name or folder/name")
    return parent, name


def _object(sha256: str) -> str:
    return f"objects/{sha256}"


def push(bundle: Path, address: str, public_key: str = "") -> str:
    """Copy a whole bundle to an address; returns the address. Objects that are there are not sent again.

    Raises UserError when the bundle is damaged, a different bundle or signature has the address, or the remote fails.
    """
    parent, name = split(address)
    local = read_bundle(bundle, key_of(public_key))
    if sentences := damage(local):
        raise UserError(f"{bundle} is damaged: {sentences[0]}; build it again before it is pushed")
    remote, key = open_remote(parent), f"{name}/{MANIFEST}"
    there, content = remote.read(key), local.content
    _refuse_another(there, content, address)
    signature = _signature_to_push(bundle, remote, name, address, key_of(public_key))
    wanted = {entry.sha256: (bundle / file, entry.bytes) for file, entry in local.files.items()}

    def send(sha256: str, told: Told) -> None:
        file, size = wanted[sha256]
        if remote.size(_object(sha256)) == size:
            told(size)
            return
        remote.put(file, _object(sha256), told)
        if remote.size(_object(sha256)) != size:
            raise UserError(f"{address}: {file.name} did not arrive whole; the same command goes on from here")

    _each(sorted(wanted), send, sum(size for _, size in wanted.values()), f"pushing {address}")
    if signature:
        remote.put(signature, f"{name}/{SIGNATURE}", lambda count: None)
    if there != content and not remote.put_new(key, content):
        _refuse_another(remote.read(key), content, address)
    return address


def _signature_to_push(bundle: Path, remote: Remote, name: str, address: str, key: str) -> Path | None:
    """The file of a signature that the store lacks; with a key, `read_bundle` has checked it.

    A stored signature is never replaced by an unchecked one.
    """
    ours, theirs = _signature_in(bundle), remote.read(f"{name}/{SIGNATURE}")
    if ours is None or ours == theirs:
        return None
    if not key and theirs is not None:
        raise UserError(
            f"{address} has a different signature, which is not replaced unseen; give --public-key with the key of "
            f"yours, or take {bundle / SIGNATURE} away"
        )
    if not key and not ours.startswith(b"untrusted comment:"):
        raise UserError(f"{bundle / SIGNATURE} is not a signature of minisign; sign the bundle again, or take it away")
    return bundle / SIGNATURE


def _signature_in(folder: Path) -> bytes | None:
    file = folder / SIGNATURE
    return file.read_bytes() if file.is_file() and not file.is_symlink() else None


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


def pull(address: str, out: Path, public_key: str = "") -> Path:
    """Copy a bundle to a local folder; its manifest appears when every digest is right.

    Raises UserError when there is no bundle, its signature is not the key's (where one is required), the folder holds
    a different bundle, a byte is wrong, or the remote fails.
    """
    remote, content, manifest = _manifest(address)
    signature = remote.read(f"{split(address)[1]}/{SIGNATURE}")
    if key := key_of(public_key):
        check_signature(content, signature, key, address)
    if (out / MANIFEST).is_file() and _digest_of(out) not in (manifest.digest, None):
        raise UserError(f"{out} holds a different bundle; pull into a different folder")
    with staged(out, beside=False) as staging:
        _pull_files(address, remote, unfinished(staging.folder, manifest, content), staging)
        # an existing signature stays, unless the new one was checked
        if signature is not None and (key or _signature_in(out) is None):
            write_whole(out / SIGNATURE, signature)
        if not (out / MANIFEST).is_file() or (out / MANIFEST).read_bytes() != content:
            staging.finish_copy(content, set(manifest.files))
    return out


def _digest_of(out: Path) -> str | None:
    # a damaged manifest is mended by a pull of the same bundle
    try:
        return read_bundle(out, key="").manifest.digest
    except UserError:
        return None


def _mended(parent: str, entry: File) -> str:
    return f"delete {parent}/{_object(entry.sha256)} and push the bundle again"


def _pull_files(address: str, remote: Remote, bundle: Bundle, staging: Staging) -> None:
    files, out, parent = bundle.files, staging.folder, split(address)[0]
    missing = sorted(name for name in files if bundle.checked(name)[1])
    total = sum(files[name].bytes for name in missing)
    free_space(out.absolute(), total)
    if missing:
        staging.begin()

    def fetch(name: str, told: Told) -> None:
        entry, file = files[name], out / name
        if file.parent != out:
            own_folder(file.parent)
        part = file.with_name(file.name + ".part")
        part.unlink(missing_ok=True)
        remote.get(_object(entry.sha256), part, told)
        if not _is(part, entry):
            part.unlink()
            raise UserError(
                f"{address}: {name} did not arrive as it was built (its sha256 differs); "
                f"pull again, and if it stays so, {_mended(parent, entry)}"
            )
        part.replace(file)

    _each(missing, fetch, total, f"pulling {address}")


def _is(file: Path, entry: File) -> bool:
    return file.stat().st_size == entry.bytes and sha256_of(file) == entry.sha256


def _manifest(address: str) -> tuple[Remote, bytes, Manifest]:
    parent, name = split(address)
    remote = open_remote(parent)
    content = remote.read(f"{name}/{MANIFEST}")
    if content is None:
        raise UserError(f"{address} holds no bundle, or its push did not finish; push it again or correct the address")
    return remote, content, parse_manifest(content, f"{address}/{MANIFEST}")


def sign_bundle(bundle: Path, key_file: Path) -> Path:
    """Sign a whole bundle by minisign's secret key; returns the signature's file. UserError for a damaged one."""
    local = read_bundle(bundle, key="")
    if sentences := damage(local):
        raise UserError(f"{bundle} is damaged: {sentences[0]}; build it again before it is signed")
    write_whole(bundle / SIGNATURE, sign(local.content, bundle.resolve().name, key_file))
    return bundle / SIGNATURE


def verify(address: str, public_key: str = "") -> list[str]:
    """One sentence for each object of a bundle that is missing, or whose size or content is wrong.

    Every byte is read where it is stored. The signature is checked too if a key is given.
    """
    remote, content, manifest = _manifest(address)
    if key := key_of(public_key):
        check_signature(content, remote.read(f"{split(address)[1]}/{SIGNATURE}"), key, address)
    found, parent = list[str](), split(address)[0]

    def check(name: str, told: Told) -> None:
        entry = manifest.files[name]
        size = remote.size(_object(entry.sha256))
        if size != entry.bytes:
            is_ = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            found.append(f"{name} {is_}; push the bundle again")
        elif remote.sha256(_object(entry.sha256), told) != entry.sha256:
            found.append(f"{name} does not hold the bytes that were pushed; {_mended(parent, entry)}")

    _each(sorted(manifest.files), check, sum(e.bytes for e in manifest.files.values()), f"verifying {address}")
    return sorted(found)


def bundles(address: str) -> list[dict[str, Any]]:
    """The bundles stored below an address: one row each; a row with `error` names the fault of a manifest."""
    if not address.strip("/"):
        raise UserError("the address is empty; give s3://bucket/folder or a folder")
    remote = open_remote(address.rstrip("/"))
    return [_row(remote, key) for key in remote.listing() if key.endswith(f"/{MANIFEST}")]


def _row(remote: Remote, key: str) -> dict[str, Any]:
    name = key[: -len(MANIFEST) - 1]
    try:
        manifest = parse_manifest(remote.read(key) or b"", key)
    except UserError as error:
        return {"name": name, "error": str(error)}
    return {
        "name": name,
        "target": manifest.title("target"),
        "draft": manifest.title("draft"),
        "tp": manifest.spec.tp,
        "k": manifest.spec.k,
        "bytes": sum(e.bytes for e in manifest.files.values()),
        "neff": manifest.compiler.neff,
    }


def _each(names: list[str], work: Callable[[str, Told], None], total: int, what: str) -> None:
    """Run the work for every name, a few at a time; the first error ends the rest."""
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
    for name, first, second in (("push", "bundle", "address"), ("pull", "address", "out")):
        command = commands.add_parser(name)
        command.add_argument(first, help="folder of the bundle" if first == "bundle" else "s3://bucket/folder/name")
        command.add_argument(second, help="local folder" if second == "out" else "s3://bucket/folder/name")
    for name in ("ls", "verify"):
        command = commands.add_parser(name)
        command.add_argument("address", help="s3://bucket/folder" + ("/name" if name == "verify" else ""))
        command.add_argument("--json", action="store_true", help="print JSON")
    for name in ("push", "pull", "verify"):
        commands.choices[name].add_argument("--public-key", default="", help="refuse bundles not signed by this key")
    sign_ = commands.add_parser("sign")
    sign_.add_argument("bundle", help="folder of the bundle")
    sign_.add_argument("--key", required=True, help="minisign's secret key file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Push, pull, list, verify or sign; the last line of stdout is the address or the folder."""
    options = _options(arguments)
    place = next(getattr(options, name) for name in ("out", "address", "bundle") if hasattr(options, name))
    guarded(lambda: _run(options), place)


def _run(options: argparse.Namespace) -> None:
    if options.command == "push":
        print(push(Path(options.bundle), options.address, options.public_key))
    elif options.command == "pull":
        print(pull(options.address, Path(options.out), options.public_key))
    elif options.command == "sign":
        print(sign_bundle(Path(options.bundle), Path(options.key)))
        print("signed: the key's owner vouches for the content, whatever the folder is called", file=sys.stderr)
    elif options.command == "ls":
        rows = bundles(options.address)
        print(json.dumps(rows, indent=1) if options.json else "\n".join(_line(r) for r in rows) or "no bundle")
        if any("error" in row for row in rows):
            raise SystemExit(1)
    else:
        found = verify(options.address, options.public_key)
        good = f"{options.address}: every object is as it was pushed"
        print(json.dumps(found) if options.json else "\n".join(found) or good)
        if found:
            raise SystemExit(1)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{ascii(row['name'])[1:-1]:<40} unusable: {row['error']}"
    pair, size = f"{row['target']} + {row['draft']}", row["bytes"] / 1e9
    return f"{row['name']:<40} {pair:<36} tp {row['tp']:<3} k {row['k']:<3} {size:8.2f} GB  neff {row['neff']}"


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
