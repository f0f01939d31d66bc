"""Random corruption of a bundle's files, and forged manifests: each is refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.errors import UserError
from tests.compile.tiny import flip, write_manifest
from tests.hostile.series import Series, refusal
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import corrupt_files as faults_of
from trnspec.bundle.opening import open_bundle, read_bundle

HUGE = 1_000_000_000


def corrupt_files(bundle: Path, scratch: Path, seed: int, count: int) -> Series:
    """Corrupt one file at a time of a verified copy."""
    rng, series = random.Random(seed), Series("corrupt files refused before anything runs")
    copy = scratch / "corrupt"
    shutil.copytree(bundle, copy)
    _verified(copy)
    names = [MANIFEST, *sorted(read_bundle(copy).files)]
    for _ in range(count):
        name, kind = rng.choice(names), rng.choice(list(KINDS))
        other = rng.choice([n for n in names if n not in (name, MANIFEST)])
        content = (copy / name).read_bytes()
        if content == (copy / other).read_bytes():
            continue
        KINDS[kind](copy / name, copy / other, rng)
        series.count(f"{kind} of {name}", refusal(lambda: _verified(copy)))
        (copy / name).write_bytes(content)
        _verified(copy)
    shutil.rmtree(copy)
    return series


def _verified(folder: Path) -> None:
    """Open a bundle and read every file."""
    if errors := faults_of(open_bundle(folder)):
        raise UserError(f"{folder} is corrupt: {errors[0]}")


KINDS: dict[str, Callable[[Path, Path, random.Random], object]] = {
    "flip": lambda file, other, rng: flip(file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8)),
    "cut": lambda file, other, rng: file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)]),
    # spaces after JSON would not change its value
    "extension": lambda file, other, rng: file.write_bytes(file.read_bytes() + b"}" + rng.randbytes(rng.randrange(64))),
    "deletion": lambda file, other, rng: file.unlink(),
    "exchange": lambda file, other, rng: shutil.copy2(other, file),
    "reversal": lambda file, other, rng: file.write_bytes(file.read_bytes()[::-1]),
}
# (path of a field, its new value); the digests are recomputed, as the author of a forged manifest would
CONFIGS, TOKENIZER = ("target_config", "draft_config"), "files|tokenizer/tokenizer.json"
SHARD = "files|weights/tp0_sharded_checkpoint.safetensors"
EDITS: list[tuple[str, Any]] = [
    *[("spec|ks", v) for v in ([1], [9], [3, 2], [2, 2], ["2"], [True], [None], [-1], [2.0], [10**9], [], 2, "2", [0])],
    *[(f"spec|{name}", v) for name in ("tp", "batch", "max_len") for v in (0, -1, 5, HUGE, "1", True, None, 1.0)],
    *[("spec|blocks", v) for v in (-1, 1, HUGE, "1", True, None)],
    *[("spec|chunks", v) for v in ([32], [64], [384], [256], [128, 128], "128", None)],
    *[("spec|dtype", v) for v in ("int9", "bf16", 32, None)],
    *[("spec|kernels", v) for v in ("x", "nki", 1, None)],
    # fields of older builds
    *[(f"spec|{name}", v) for name in ("kv_shard", "draft_tp") for v in ("heads", 0)],
    *[("spec|drafter", v) for v in ("eagle3", "dflash", "parallel", "ngram", "none", "x", "", 7, None)],
    *[("spec|draft_config", v) for v in (None, {}, [], 7, {"hidden_size": 32})],
    *[(f"spec|{of}|vocab_size", v) for of in CONFIGS for v in (5, 0, -64, "64", HUGE)],
    *[(f"spec|{of}|hidden_size", v) for of in CONFIGS for v in (0, 64, -32, "32", HUGE)],
    *[(f"spec|{of}|intermediate_size", v) for of in CONFIGS for v in (0, 47, -32, True, HUGE)],
    *[(f"spec|{of}|num_hidden_layers", v) for of in CONFIGS for v in (0, 3, 500, HUGE)],
    *[(f"spec|{of}|num_attention_heads", v) for of in CONFIGS for v in (0, 3, 1024, HUGE)],
    *[(f"spec|{of}|num_key_value_heads", v) for of in CONFIGS for v in (0, 3, 4, HUGE)],
    *[(f"spec|{of}|head_dim", v) for of in CONFIGS for v in (0, 16, 7, HUGE)],
    *[(f"spec|{of}|max_position_embeddings", v) for of in CONFIGS for v in (0, 64, "x")],
    *[(f"spec|{of}|eos_token_ids", v) for of in CONFIGS for v in ("x", [HUGE * 10], [-1], 7, [[]], [0] * 65)],
    *[(f"spec|{of}|rope_theta", v) for of in CONFIGS for v in ("nan", float("nan"), float("inf"), 0, None)],
    *[(f"spec|{of}|surprise", v) for of in CONFIGS for v in (1,)],
    *[("spec|target", v) for v in ("", 7, "a\nb", "\x1b[2J", "x" * 5000, "\ud800", "\u2028", None)],
    *[("spec", v) for v in ({}, [], None, "x", {"ks": []})],
    *[("spec|surprise", v) for v in (1, None)],
    *[("graphs", v) for v in ([], None, {}, "x", {"hlo/x.hlo.pb": "0" * 64})],
    ("graphs|hlo/step_k2_bk128.hlo.pb", "0" * 64),
    *[("files", v) for v in ({}, [], None, "x", {"a": {}}, {"a": {"sha256": "x", "bytes": 1}}, {"a": []})],
    *[(f"{TOKENIZER}|bytes", v) for v in (-1, "1", True, 1.5, None, 1 << 40, 1 << 60)],
    *[(f"{TOKENIZER}|sha256", v) for v in ("x", "0" * 63, "A" * 64, 7, None)],
    *[(f"{TOKENIZER}|recipe", v) for v in ("x", "", None)],
    # sizes that the plan knows
    *[(f"{name}|bytes", v) for name in (SHARD, "files|hlo/step_k2_bk128.hlo.pb") for v in (30 << 30, 1 << 50)],
    (f"{SHARD}|bytes", 8),
    *[("compiler", v) for v in (None, [], "x")],
    *[("compiler|toolchain", v) for v in ("gpu", "full", None)],
    *[("compiler|neff", v) for v in ("model.pt", "x", 1)],
    *[("compiler|lnc", v) for v in (3, "2", True, None)],
    *[("compiler|flags", v) for v in ([], {"a": 1}, {str(i): "" for i in range(9)})],
    *[("format", v) for v in ("x", None, 7)],
    *[("format_version", v) for v in (0, 3, 5, "4", True, None, 4.0)],
    *[("versions", v) for v in ([], {"torch": 7}, None)],
    *[("commit", v) for v in (7, "a\nb", [], "x" * 300)],
    *[(name, v) for name in ("surprise", "plan", "digest") for v in (1, None, {})],
]
NAMES = ["", ".", "..", "../x", "/x", "a/../b", "a//b", "a/", "./a", ".build/x", MANIFEST, "MANIFEST.JSON", "a\0",
         "a\n", "a\x1b[2J", "a\\b", "x.part", "logs/x.tmp", "a b", "é", "\ud800", "x" * 300, "hlo", "logs", "hlo/x",
         "weights/tp1_sharded_checkpoint.safetensors", "weights/x", "Tokenizer/tokenizer.json", "executables/x",
         "a" + "/a" * 20]  # fmt: skip


def forge(bundle: Path, scratch: Path, read: Callable[[Path], object]) -> Series:
    """Edited manifests with right digests: each is refused before a value of it is used."""
    series, copy = Series("forged manifests refused"), scratch / "forged"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    entry = manifest["files"]["tokenizer/tokenizer.json"]
    for where, value in [*EDITS, *(("files", manifest["files"] | {name: entry}) for name in NAMES)]:
        forged = json.loads(json.dumps(manifest))
        if _put(forged, where.split("|"), value):
            continue
        write_manifest(copy, forged)
        added = sorted(set(value or ()) - set(manifest["files"])) if where == "files" else str(value)[:40]
        series.count(f"{where} = {added!r}", refusal(lambda: read(copy)))
    for content in (b"", b"[]", b"null", b"7", b"{", b"\xff", b"[" * 100_000, b'{"format": "trnspec-bundle"}',
                    b"1" * 5000):  # fmt: skip
        (copy / MANIFEST).write_bytes(content)
        series.count(f"manifest {content[:20]!r}", refusal(lambda: read(copy)))
    shutil.rmtree(copy)
    return series


def _put(value: Any, path: list[str], new: Any) -> bool:
    """Change a field in place; whether it had this value before."""
    *path, last = path
    for step in path:
        value = value[step]
    same = last in value and type(value[last]) is type(new) and value[last] == new
    value[last] = new
    return same
