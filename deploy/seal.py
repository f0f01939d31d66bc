"""`python -m deploy.seal DIR`: make a bundle of what the engine compiled for itself.

compile.build makes pairs. The baseline's target alone is compiled by the engine, with the flags that
the server will have; with a manifest over it, it is stored, fetched and checked like any bundle.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compile.serve_command import CONFIG, MODEL
from deploy.artifact import Expected, add_arguments, check_config, check_manifest, expected_of
from model.artifact import FORMAT, FORMAT_VERSION, MANIFEST, manifest_digest, sha256_of
from model.errors import UserError, run_cli


def seal(folder: Path, target: str, dtype: str, expected: Expected) -> Path:
    """Write the manifest, last, over a folder whose neuron_config.json says what was asked for."""
    check_config(folder, expected)
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    if MODEL not in names:
        raise UserError(f"{folder} has {CONFIG} and no {MODEL}: the engine did not finish; compile again")
    files = {n: {"sha256": sha256_of(folder / n), "bytes": (folder / n).stat().st_size} for n in names}
    manifest = _manifest(target, dtype, expected) | {"files": files}
    check_manifest(manifest, expected, str(folder))
    manifest["manifest_sha256"] = manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def _manifest(target: str, dtype: str, expected: Expected) -> dict[str, Any]:
    return {
        "format": FORMAT, "format_version": FORMAT_VERSION, "complete": True,
        "spec": {"target": target, "draft": None, "compiled_by": "engine"},
        "models": {"target": {"name": target}, "draft": {"name": "none"}},
        "k": expected.k, "rows": expected.k + 1, "speculation_length": 0, "tp": expected.tp, "draft_tp": 0,
        "batch": expected.batch, "max_len": expected.max_len, "buckets": [expected.max_len], "dtype": dtype,
        "graphs": [], "weights": {"layout": "nxdi", "ranks": expected.tp}, "toolchain": "engine", "neff": MODEL,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """The last line of stdout is the bundle."""
    parser = argparse.ArgumentParser(prog="python -m deploy.seal", description=__doc__)
    parser.add_argument("folder", type=Path, help="what the engine wrote to NEURON_COMPILED_ARTIFACTS")
    parser.add_argument("--target", required=True, help="the model's name")
    parser.add_argument("--dtype", default="bf16")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    print(seal(options.folder, options.target, options.dtype, expected_of(options)))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
