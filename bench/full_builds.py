"""`python -m bench.full_builds`: Qwen3-32B at tp 32 with every drafter that has a model, built without weights.

Each build is a process of its own, and says its wall time and its peak memory. No published checkpoint is read: the
parallel draft is Qwen3-0.6B with a mask id, as amd/PARD-Qwen3-0.6B; the EAGLE-3 head has the shape of
RedHatAI/Qwen3-32B-speculator.eagle3, with 32000 ids of its own and a layer as wide as the target's; Medusa has a
residual layer a head and one projection. A build over the bounds ends the run with 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.provenance import header, said, write_result
from bench.tune.text import markdown
from model.config import PRESETS
from model.errors import UserError, run_cli
from model.progress import progress

TP, K, MAX_LEN = 32, 7, 1024
# what a build may take: several times its seconds on a quiet machine; one rank's weights more are over the bytes
MOST_SECONDS, MOST_BYTES = 120.0, 0.75e9
_TARGET, _CHAIN, _PARALLEL = (PRESETS[f"Qwen/Qwen3-{size}"] for size in ("32B", "1.7B", "0.6B"))
_SHAPE = ("hidden_size", "vocab_size")


def configs(layers: int) -> dict[str, dict[str, Any]]:
    """The config.json of the target, with so many layers, and of each drafter for it."""
    target = {"model_type": "qwen3"} | asdict(_TARGET) | {"num_hidden_layers": layers}
    width = {name: target[name] for name in _SHAPE}
    head = {
        "speculators_model_type": "eagle3", "draft_vocab_size": 32000, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
        "transformer_layer_config": target | {"model_type": "llama", "num_hidden_layers": 1},
    }  # fmt: skip
    return {
        "target": target,
        "chain": {"model_type": "qwen3"} | asdict(_CHAIN),
        "parallel": {"model_type": "qwen3"} | asdict(_PARALLEL) | {"pard_token": 151670},
        "eagle3": head,
        "medusa": width | {"model_type": "medusa", "num_heads": K, "num_hidden_layers": 1, "original_lm_head": True},
    }


DRAFTERS = tuple(name for name in configs(_TARGET.num_hidden_layers) if name != "target")


def built(drafter: str, folder: Path, layers: int, max_len: int, kernels: str = "reference") -> dict[str, Any]:
    """A row: one build in a process of its own, in an empty folder."""
    for name, config in configs(layers).items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = {"target": folder / "target", "draft": folder / drafter, "tp": TP, "k": K, "max-len": max_len}
    parts = (p for name, value in flags.items() for p in (f"--{name}", str(value)))
    command = [sys.executable, "-m", "compile.build", *parts, "--kernels", kernels, "--toolchain", "cpu", "--json"]
    command += ["--out", str(folder / "bundle")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"the build with {drafter} ended with {done.returncode}; what it said is above")
    about = json.loads(done.stdout)
    row = {"drafter": drafter, "kernels": kernels, "layers": layers, "graphs": len(about["graphs"])}
    return row | {name: about["cost"][name] for name in ("wall_seconds", "peak_bytes")}


def within(row: dict[str, Any]) -> bool:
    """Whether a build took no more than it may."""
    return bool(row["wall_seconds"] <= MOST_SECONDS and row["peak_bytes"] <= MOST_BYTES)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a build."""
    heads = ["drafter", "kernels", "target's layers", "graphs", "wall, s", "peak memory, GB"]
    return markdown(heads, [
        [r["drafter"], r["kernels"], str(r["layers"]), str(r["graphs"]), f"{r['wall_seconds']:.1f}",
         f"{r['peak_bytes'] / 1e9:.2f}"]
        for r in rows
    ])  # fmt: skip


def main(arguments: list[str]) -> None:
    """Build, print the table; exit 1 if a build took more than it may."""
    parser = argparse.ArgumentParser(prog="python -m bench.full_builds", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS, help="which (default: all)")
    parser.add_argument("--kernels", nargs="+", default=["reference"], choices=("reference", "nki"), help="which")
    parser.add_argument("--layers", type=int, default=_TARGET.num_hidden_layers, help="of the target (default: all)")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON")
    options = parser.parse_args(arguments)
    if options.layers < 7:
        raise UserError(f"--layers is {options.layers}; the EAGLE-3 head reads three layers of at least 7")
    rows = []
    for kernels in options.kernels:
        for drafter in options.drafters:
            with tempfile.TemporaryDirectory() as folder, progress(f"{drafter}, {kernels}"):
                rows.append(built(drafter, Path(folder), options.layers, MAX_LEN, kernels))
    result = header("wall") | {"tp": TP, "k": K, "max_len": MAX_LEN, "rows": rows}
    if options.out:
        write_result(options.out, result)
    print(f"{said(result)}; Qwen3-32B, tp {TP}, k {K}, without weights.\n\n{table(rows)}")
    if not all(map(within, rows)):
        print(f"A build took more than {MOST_SECONDS:g} s or {MOST_BYTES / 1e9:g} GB.", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
