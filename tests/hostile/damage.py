"""Random damages of a bundle's files and of its manifest: none may load, each is refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.bundle.manifest import MANIFEST, canonical_hash, manifest_digest
from model.bundle.opening import open_bundle
from tests.hostile.series import Series, refusal

HUGE = 1_000_000_000


def damage_files(bundle: Path, scratch: Path, seed: int, count: int) -> Series:
    """Flips, cuts, extensions, deletions, exchanges and edits, one at a time, on a copy that was verified before."""
    rng, series = random.Random(seed), Series("damages refused before anything runs")
    copy = scratch / "damaged"
    shutil.copytree(bundle, copy)
    open_bundle(copy)
    names = [MANIFEST, *sorted(open_bundle(copy)["files"])]
    for _ in range(count):
        name, kind = rng.choice(names), rng.choice(list(KINDS))
        other = rng.choice([n for n in names if n not in (name, MANIFEST)])
        if (copy / name).read_bytes() == (copy / other).read_bytes():
            continue
        kept = {n: (copy / n).read_bytes() for n in (name, other)}
        KINDS[kind](copy / name, copy / other, rng)
        series.count(f"{kind} of {name}", refusal(lambda: open_bundle(copy)))
        for n, content in kept.items():
            (copy / n).write_bytes(content)
        open_bundle(copy)
    shutil.rmtree(copy)
    return series


def _flip(file: Path, _: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _cut(file: Path, _: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def _extend(file: Path, _: Path, rng: random.Random) -> None:
    # blanks after JSON are no change of what it says
    file.write_bytes(file.read_bytes() + b"}" + rng.randbytes(rng.randrange(64)))


def _delete(file: Path, _: Path, rng: random.Random) -> None:
    file.unlink()


def _replace(file: Path, other: Path, rng: random.Random) -> None:
    shutil.copy2(other, file)


def _folder(file: Path, _: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.unlink()
    file.symlink_to(file.parent)
    file.unlink()
    file.write_bytes(content[::-1])


KINDS: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "flip": _flip,
    "cut": _cut,
    "extension": _extend,
    "deletion": _delete,
    "exchange": _replace,
    "reversal": _folder,
}
# where a field is, and what it becomes; the digests are computed anew, as an author of a forged manifest would
EDITS: list[tuple[str, Any]] = [
    *[("k", v) for v in (1, 9, "7", True, None, -1, 7.0, 10**9, [])],
    *[(name, v) for name in ("tp", "batch", "max_len", "rows", "draft_tp") for v in (0, -1, 5, HUGE, "1", True, None)],
    *[("buckets", v) for v in ([], [64], [256, 128], "128", [HUGE], [128, 128], 128, [True])],
    *[("dtype", v) for v in ("int9", "bf16", 32, None)],
    *[("graphs", v) for v in ([], None, {}, "x", [[]], [{}])],
    *[("files", v) for v in ({}, [], None, "x", {"a": {}}, {"a": {"sha256": "x", "bytes": 1}}, {"a": []})],
    *[("weights.ranks", v) for v in (0, 2, HUGE, "1")],
    *[("weights.draft_head_ranks", v) for v in (0, 2, HUGE, "1")],
    *[("models.target.config.vocab_size", v) for v in (5, 0, -64, "64", HUGE)],
    *[("models.target.config.hidden_size", v) for v in (0, 64, -32, "32", HUGE)],
    *[("models.target.config.num_hidden_layers", v) for v in (0, 1, 3, HUGE)],
    *[("models.target.config.eos_token_ids", v) for v in ("x", [HUGE], [-1], 7, [[]])],
    *[("models.target.config.rope_theta", v) for v in ("nan", 0, None)],
    *[("models.target.name", v) for v in ("", 7, "a\nb", "\x1b[2J", "x" * 5000)],
    *[("models", v) for v in ({}, None, [], {"target": {}})],
    *[("graphs.0.k", v) for v in (0, 31, "3")],
    *[("graphs.0.bucket", v) for v in (0, 64, HUGE)],
    *[("graphs.0.tag", v) for v in ("x", "", None)],
    *[("graphs.0.file", v) for v in ("/etc/passwd", "../x", "hlo/x")],
    *[("graphs.0.inputs.0.1", v) for v in ([HUGE, HUGE], [], [-1], "x")],
    *[("graphs.0.weights.0.1", v) for v in ([HUGE, HUGE], [1], [10**40])],
    # a tensor in the middle of a layer, of either model
    *[(f"graphs.0.weights.{at}.1", v) for at in (6, 9, 20, 30) for v in ([1], [HUGE, HUGE], [16, 16, 16], [])],
    *[("graphs.0.weights.0.2", v) for v in ("int9", "bfloat16", None)],
    *[("graphs.0.state.0.1", v) for v in ([HUGE] * 4, [])],
    *[("toolchain", v) for v in ("gpu", "full", None)],
    *[("neff", v) for v in ("model.pt", "x", 1)],
    *[("format", v) for v in ("x", None, 7)],
    *[("format_version", v) for v in (0, 2, "1", True, None, 1.0)],
    *[("spec", v) for v in ({}, [], None, {"k": []})],
    *[("complete", v) for v in (False, 1, None)],
    *[("versions", v) for v in ([], {"torch": 7})],
]
NAMES = ["", ".", "..", "../x", "/x", "a/../b", "a//b", "a/", "./a", ".build/x", MANIFEST, "MANIFEST.JSON", "a\0",
         "a\n", "a\x1b[2J", "a\\b", "x.part", "x.tmp", "a b", "é", "\ud800", "x" * 300, "hlo",
         "a" + "/a" * 20]  # fmt: skip


def forge(bundle: Path, scratch: Path, read: Callable[[Path], object]) -> Series:
    """Edited manifests with right digests: each is refused, before a number of it is used."""
    series, copy = Series("forged manifests refused"), scratch / "forged"
    shutil.copytree(bundle, copy)
    whole = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    entry = whole["files"]["neuron_config.json"]
    edits = [*EDITS, *(("files", whole["files"] | {name: entry}) for name in NAMES)]
    for where, value in edits:
        manifest = json.loads(json.dumps(whole))
        if _put(manifest, where, value):
            continue
        if isinstance(manifest.get("spec"), dict) and where in manifest["spec"]:
            manifest["spec"][where] = value
        manifest["config_hash"] = canonical_hash([manifest["spec"], manifest["models"]])
        manifest["manifest_sha256"] = manifest_digest(manifest)
        (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        what = (
            f"{where} = {str(value)[:40]!r}"
            if where != "files"
            else f"files {sorted(set(value or ()) - set(whole['files']))}"
        )
        series.count(what, refusal(lambda: read(copy)))
    for content in (
        b"",
        b"[]",
        b"null",
        b"7",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"format": "trnspec-bundle"}',
        b"1" * 5000,
    ):
        (copy / MANIFEST).write_bytes(content)
        series.count(f"manifest {content[:20]!r}", refusal(lambda: read(copy)))
    shutil.rmtree(copy)
    return series


def _put(value: Any, where: str, new: Any) -> bool:
    """Change a field in place; whether it had that value already."""
    *path, last = where.split(".")
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value[step]
    key: Any = int(last) if isinstance(value, list) else last
    # a field that need not be there may be added
    same = (isinstance(value, list) or key in value) and type(value[key]) is type(new) and value[key] == new
    value[key] = new
    return same
