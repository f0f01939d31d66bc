"""`python -m compile.store push|pull|ls|verify|sign`: bundles in S3 or in a folder.

A bundle at s3://bucket/team/name is its manifest, s3://bucket/team/name/manifest.json; its files are
s3://bucket/team/objects/<sha256>. The manifest is written last, so a bundle exists when its manifest does, and an
interrupted push or pull goes on with the files that are missing.
"""

import concurrent.futures
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile.bundle.remote import Remote, open_remote
from compile.bundle.staging import staged, write_small
from model.errors import UserError, command_line, guarded, run_cli
from model.progress import progress
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest, parse_manifest
from trnspec.bundle.opening import SIGNATURE_BYTES, Bundle, corrupt_files, read_bundle
from trnspec.bundle.signature import SIGNATURE, check_signature, key_of, sign

_WORKERS = 4
# files by their digests
OBJECTS = "objects/"


def push(bundle: Path, address: str, public_key: str = "") -> str:
    """Copy a bundle to an address; returns the address. Objects that are there are not sent again.

    Raises UserError if the bundle is corrupt, the address has a different bundle or signature, or the remote fails.
    """
    (parent, name), key = split(address), key_of(public_key)
    local, remote, manifest = _verified(bundle, key, "pushed"), open_remote(parent), f"{name}/{MANIFEST}"
    there = _small(remote, manifest, MANIFEST_BYTES)
    _refuse_another(there, local.content, address)
    ours, stored = local.signature, _small(remote, f"{name}/{SIGNATURE}", SIGNATURE_BYTES)
    if not key and ours not in (None, stored) and (stored or not ours.startswith(b"untrusted comment:")):
        raise UserError(
            f"{bundle / SIGNATURE} is not minisign's, or differs from the signature at {address}; give --public-key "
            "with its key, or remove it"
        )

    def send(file: str, entry: File) -> None:
        if remote.size(key := OBJECTS + entry.sha256) != entry.bytes:
            remote.put(bundle / file, key)

    # files of equal content are one object
    unique = {entry.sha256: (file, entry) for file, entry in local.files.items()}
    _each(dict(unique.values()), send, f"pushing {address}")
    if ours and ours != stored:
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
        # a pull of the same bundle replaces a corrupt manifest
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
    """Read every object of a bundle; one sentence for each that is missing, or whose size or content is wrong.

    The signature is checked too if a key is given.
    """
    remote, _, manifest, _ = _stored(address, key_of(public_key))
    faults = list[str]()

    def check(name: str, entry: File) -> None:
        if clause := _receive(remote, entry, len):
            faults.append(f"{name} {clause}")

    _each(manifest.files, check, f"verifying {address}")
    return sorted(faults)


def sign_bundle(bundle: Path, key: Path) -> Path:
    """Sign a bundle with minisign's secret key; returns the signature's file. Raises UserError if it is corrupt."""
    local = _verified(bundle, "", "signed")
    write_small(bundle / SIGNATURE, sign(local.content, bundle.resolve().name, key))
    return bundle / SIGNATURE


def bundles(address: str) -> dict[str, Manifest | UserError]:
    """The bundles stored below an address: name -> manifest, or what is wrong with it."""
    remote, stored = open_remote(address.rstrip("/") or "no address"), dict[str, Manifest | UserError]()
    for key in (key for key in remote.keys() if key.endswith(f"/{MANIFEST}")):  # noqa: SIM118
        name = key[: -len(MANIFEST) - 1]
        try:
            stored[name] = parse_manifest(_small(remote, key, MANIFEST_BYTES) or b"", key)
        except UserError as error:
            stored[name] = error
    return stored


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

    def both(chunk: bytes) -> None:
        digest.update(chunk)
        write(chunk)

    remote.get(key, size, both)
    if digest.hexdigest() == entry.sha256:
        return ""
    return (
        "did not arrive as it was built (its sha256 differs); try again, and if it stays so, delete "
        f"{remote.address}/{key} and push the bundle again"
    )


def _small(remote: Remote, key: str, limit: int) -> bytes | None:
    """The content of a small object; None if it does not exist."""
    content = bytearray()
    if (size := remote.size(key)) is None:
        return None
    if size > limit:
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


def _verified(bundle: Path, key: str, done: str) -> Bundle:
    local = read_bundle(bundle, key)
    if faults := corrupt_files(local):
        raise UserError(f"{bundle} is corrupt: {faults[0]}; build it again before it is {done}")
    return local


def _refuse_another(there: bytes | None, ours: bytes, address: str) -> None:
    # a killed push leaves the beginning of this manifest in a folder
    if there is not None and not ours.startswith(there):
        begins = shown(there[:20].decode("latin-1"))
        raise UserError(
            f"{address} holds a different bundle, or a proxy answered (it begins with {begins}); log in, or push to a "
            "different name"
        )


def _each(files: dict[str, File], work: Callable[[str, File], None], what: str) -> None:
    """Run `work` for every file, a few at a time; the first error cancels the rest."""
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


# command -> its function, its arguments and what it does
_COMMANDS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "push": (push, "bundle address", "Verify a bundle and copy it to an address."),
    "pull": (pull, "address out", "Copy a bundle to a folder and verify it."),
    "ls": (bundles, "address", "List the bundles below an address."),
    "verify": (verify, "address", "Read and verify every object of a stored bundle."),
    "sign": (sign_bundle, "bundle", "Verify a bundle and sign its manifest."),
}


def main(arguments: list[str]) -> None:
    """Run a command; the last line of stdout is the address or the folder."""
    parser = command_line(
        "compile.store", "Store bundles in S3 or in a folder.", "push bundles/demo s3://models/team/demo"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    places = {"bundle": "folder of the bundle", "address": "s3://bucket/folder/name, or a folder", "out": "new folder"}
    for name, (_, arguments_of, does) in _COMMANDS.items():
        command = commands.add_parser(name, help=does, description=does)
        for place in arguments_of.split():
            command.add_argument(place, type=str if place == "address" else Path, help=places[place])
        if name in ("push", "pull", "verify"):
            command.add_argument("--public-key", default="", help="require a signature of this minisign key")
    commands.choices["sign"].add_argument("--key", type=Path, required=True, help="minisign's secret key file")
    given = vars(parser.parse_args(arguments))
    name = given.pop("command")
    run, arguments_of, _ = _COMMANDS[name]
    result, lines = guarded(lambda: run(**given), str(given[arguments_of.split()[-1]])), list[str]()
    if name == "ls":
        lines = [
            f"{ascii(n)[1:-1]:<40} {f'unusable: {m}' if isinstance(m, UserError) else m}" for n, m in result.items()
        ]
    elif name == "verify":
        lines = result or [f"{given['address']}: every object is as it was pushed"]
    else:
        lines = [str(result)]
    print(*lines, sep="\n", end="\n" * bool(lines))
    if (name == "verify" and result) or (name == "ls" and any(isinstance(m, UserError) for m in result.values())):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
