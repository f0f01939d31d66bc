"""`python -m compile.store push|pull|ls|verify`: bundles in S3, by content, the manifest last.

A bundle at s3://bucket/team/name is its manifest, s3://bucket/team/name/manifest.json; its files
are s3://bucket/team/objects/<sha256>, shared with every bundle of the same team. So what is equal
is stored once, an interrupted push or pull goes on where it stopped, and a bundle is there when
its manifest is, and not before.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from compile.bundle.remote import Remote, Told, free_space, open_remote
from compile.bundle.staging import Staging
from model.bundle.manifest import MANIFEST, Bundle, damage, manifest_digest, parse_manifest, read_bundle, sha256_of
from model.errors import UserError, guarded, run_cli

_WORKERS = 4


def split(address: str) -> tuple[str, str]:
    """The parent of a bundle's address, where objects are shared, and the bundle's name in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    if not parent or parent in ("s3:/", "s3:") or name in ("", ".", "..", "objects"):
        raise UserError(f"{address} does not name a bundle; give s3://bucket/folder/name or folder/name")
    return parent, name


def _object(sha256: str) -> str:
    return f"objects/{sha256}"


def push(bundle: Path, address: str, progress: Progress | None = None, again: bool = False) -> str:
    """Copy a whole bundle to an address; returns the address. What is there already is not sent, but with `again`.

    Raises UserError when the bundle is damaged, another bundle has the address, or the remote fails.
    """
    parent, name = split(address)
    local = read_bundle(bundle)
    if found := damage(local):
        raise UserError(f"{bundle} is damaged: {found[0]}; build it again before it is pushed")
    remote, key = open_remote(parent), f"{name}/{MANIFEST}"
    there = remote.read(key)
    content = (bundle / MANIFEST).read_bytes()
    _refuse_another(there, content, address)
    wanted = {entry["sha256"]: (bundle / file, entry["bytes"]) for file, entry in local["files"].items()}

    def send(sha256: str, told: Told) -> None:
        file, size = wanted[sha256]
        if not again and remote.size(_object(sha256)) == size:
            told(size)
            return
        remote.put(file, _object(sha256), told)
        if remote.size(_object(sha256)) != size:
            raise UserError(f"{address}: {file.name} did not arrive whole; the same command goes on from here")

    _each(sorted(wanted), send, sum(size for _, size in wanted.values()), progress, "push")
    if there != content and not remote.put_new(key, content):
        _refuse_another(remote.read(key), content, address)
    return address


def _refuse_another(there: bytes | None, ours: bytes, address: str) -> None:
    # the beginning of our own manifest is what a killed push leaves in a folder
    if there is not None and not ours.startswith(there):
        raise UserError(f"{address} holds another bundle, which is never overwritten; push to another name")


def pull(address: str, out: Path, progress: Progress | None = None) -> Path:
    """Copy a bundle to a local folder; its manifest appears when every digest is right.

    Raises UserError when there is no bundle, the folder is another's, a byte is wrong, or the remote fails.
    """
    remote, content, manifest = _manifest(address)
    files: dict[str, Any] = manifest["files"]
    staging = Staging(out)
    if (out / MANIFEST).is_file() and read_bundle(out)["manifest_sha256"] != manifest["manifest_sha256"]:
        raise UserError(f"{out} holds another bundle; pull into another folder")
    missing = sorted(name for name, entry in files.items() if not _intact(out / name, entry))
    free_space(out.absolute(), sum(files[name]["bytes"] for name in missing))
    if missing:
        staging.begin()

    def fetch(name: str, told: Told) -> None:
        entry, file = files[name], out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        remote.get(_object(entry["sha256"]), part, told)
        if not _intact(part, entry):
            part.unlink()
            raise UserError(
                f"{address}: {name} did not arrive as it was built (its sha256 differs); "
                "pull again, and if it stays so, push the bundle with --again, which sends every object anew"
            )
        part.replace(file)

    _each(missing, fetch, sum(files[name]["bytes"] for name in missing), progress, "pull")
    staging.finish_copy(content, set(files))
    return out


def _intact(file: Path, entry: dict[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == entry["bytes"] and sha256_of(file) == entry["sha256"]


def _manifest(address: str) -> tuple[Remote, bytes, dict[str, Any]]:
    parent, name = split(address)
    remote = open_remote(parent)
    content = remote.read(f"{name}/{MANIFEST}")
    if content is None:
        raise UserError(f"{address} holds no bundle, or its push did not finish; push it again or correct the address")
    bundle = parse_manifest(content, f"{address}/{MANIFEST}", Path(address))
    _check_names(bundle)
    if manifest_digest(bundle.manifest) != bundle["manifest_sha256"]:
        raise UserError(f"{address}/{MANIFEST} was changed after it was written; push the bundle to another name")
    return remote, content, bundle.manifest


def _check_names(bundle: Bundle) -> None:
    # a manifest comes from outside: no name may leave the folder
    for name in bundle["files"]:
        path = PurePosixPath(name)
        outside = path.is_absolute() or ".." in path.parts or "\\" in name
        if outside or path.parts[0] in (".build", MANIFEST):
            raise UserError(f"{bundle.path}: the manifest names {name!r}, no file of a bundle; do not trust it")


def verify(address: str, progress: Progress | None = None) -> list[str]:
    """One sentence for each object of a bundle that is missing or of another size."""
    remote, _, manifest = _manifest(address)
    found: list[str] = []

    def check(name: str, told: Told) -> None:
        entry = manifest["files"][name]
        size = remote.size(_object(entry["sha256"]))
        if size != entry["bytes"]:
            is_ = "is missing" if size is None else f"has {size} bytes instead of {entry['bytes']}"
            found.append(f"{name} {is_}; push the bundle again")
        told(entry["bytes"])

    _each(sorted(manifest["files"]), check, sum(e["bytes"] for e in manifest["files"].values()), progress, "verify")
    return sorted(found)


def bundles(address: str) -> list[dict[str, Any]]:
    """What is stored below an address: one row a bundle."""
    remote, rows = open_remote(address.rstrip("/")), []
    for key in remote.listing():
        if key.endswith(f"/{MANIFEST}") and (content := remote.read(key)):
            manifest = parse_manifest(content, key, Path(key)).manifest
            rows.append(
                {
                    "name": key[: -len(MANIFEST) - 1],
                    "target": manifest["models"]["target"]["name"],
                    "draft": manifest["models"]["draft"]["name"],
                    "tp": manifest["tp"],
                    "k": manifest["k"],
                    "bytes": sum(e["bytes"] for e in manifest["files"].values()),
                    "neff": manifest["neff"],
                }
            )
    return rows


def _each(
    names: list[str], work: Callable[[str, Told], None], total: int, progress: Progress | None, what: str
) -> None:
    """Run the work for every name, a few at a time; the first error ends the rest."""
    task = progress.add_task(what, total=total) if progress else None

    def told(count: int) -> None:
        if progress and task is not None:
            progress.advance(task, count)

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        running = [pool.submit(work, name, told) for name in names]
        try:
            for done in concurrent.futures.as_completed(running):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def shown(work: Callable[[Progress], Any]) -> Any:
    """Run a transfer with its progress bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        return work(progress)


def main(arguments: list[str]) -> None:
    """Push, pull, list or verify; the last line of stdout is the address or the folder."""
    parser = argparse.ArgumentParser(prog="python -m compile.store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, first, second in (("push", "bundle", "address"), ("pull", "address", "out")):
        command = commands.add_parser(name)
        command.add_argument(first, help="folder of the bundle" if first == "bundle" else "s3://bucket/folder/name")
        command.add_argument(second, help="local folder" if second == "out" else "s3://bucket/folder/name")
    commands.choices["push"].add_argument("--again", action="store_true", help="send also what is there already")
    for name in ("ls", "verify"):
        command = commands.add_parser(name)
        command.add_argument("address", help="s3://bucket/folder" + ("/name" if name == "verify" else ""))
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    guarded(lambda: _run(options), getattr(options, "out", options.address))


def _run(options: argparse.Namespace) -> None:
    if options.command == "push":
        print(shown(lambda p: push(Path(options.bundle), options.address, p, options.again)))
    elif options.command == "pull":
        print(shown(lambda p: pull(options.address, Path(options.out), p)))
    elif options.command == "ls":
        rows = bundles(options.address)
        print(json.dumps(rows, indent=1) if options.json else "\n".join(_line(r) for r in rows) or "no bundle")
    else:
        found = shown(lambda p: verify(options.address, p))
        print(json.dumps(found) if options.json else "\n".join(found) or f"{options.address}: every object is there")
        if found:
            raise SystemExit(1)


def _line(row: dict[str, Any]) -> str:
    pair, size = f"{row['target']} + {row['draft']}", row["bytes"] / 1e9
    return f"{row['name']:<40} {pair:<36} tp {row['tp']:<3} k {row['k']:<3} {size:8.2f} GB  neff {row['neff']}"


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
