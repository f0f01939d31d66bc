"""`python -m compile.doctor DIR`: what a bundle is, whether it is whole, and whether it can generate here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compile.graph.contract import violations
from model.bundle.manifest import Bundle, read_bundle
from model.bundle.opening import damage
from model.bundle.shards import faults
from model.errors import UserError, run_cli

_MASKS = {0: "none", 2: "one token a step", 3: "of each draft"}


def findings(bundle: Bundle) -> list[str]:
    """One sentence for each thing that keeps the bundle from generating here, worst first."""
    found = [f"{sentence}; build the bundle again or copy it again" for sentence in damage(bundle)]
    listed, whole = bundle["files"], not found
    for graph in bundle.graphs:
        if whole:
            proto = (bundle.path / graph.file).read_bytes()
            found += [f"{graph.file}: {s}; build the bundle again" for s in violations(graph, proto, bundle["tp"])]
    if bundle["weights"] is None:
        found.append("the bundle has no weights; build it with --checkpoint and --draft-checkpoint")
    else:
        if whole:
            found += [f"{fault}; build the bundle again" for fault in faults(bundle)]
        if "tokenizer/tokenizer.json" not in listed:
            found.append("the bundle has no tokenizer; build it from a checkpoint folder with tokenizer.json")
    return found


def summary(bundle: Bundle) -> dict[str, Any]:
    """What the bundle is."""
    files = bundle["files"]
    return {
        "models": {role: bundle.title(role) for role in ("target", "draft")},
        "drafter": bundle.drafting.kind, "k": bundle["k"], "ks": list(bundle.ks), "rows": bundle["rows"],
        "tp": bundle["tp"],
        "draft_tp": bundle["draft_tp"], "kv_shard": bundle.manifest.get("kv_shard", "heads"), "batch": bundle["batch"],
        "separate": bundle.separate, "masks": _MASKS[bundle.mask_axes],
        "max_len": bundle["max_len"], "buckets": bundle["buckets"], "dtype": bundle["dtype"],
        "graphs": len(bundle.graphs), "toolchain": bundle["toolchain"], "neff": bundle["neff"],
        "weights": "none" if bundle["weights"] is None else f"{bundle['weights']['ranks']} ranks",
        "versions": bundle["versions"], "commit": bundle["commit"],
        "files": len(files), "bytes": sum(f["bytes"] for f in files.values()),
    }  # fmt: skip


def verify(path: str | Path) -> dict[str, Any]:
    """The summary of a bundle that can generate; UserError says the worst of what keeps one from it, and how many."""
    bundle = read_bundle(Path(path))
    about, found = summary(bundle), findings(bundle)
    if found:
        more = f" (and {len(found) - 1} more; python -m compile.doctor lists them)" if len(found) > 1 else ""
        raise UserError(f"{path} cannot generate: {found[0]}{more}")
    return about


def _verdict(bundle: Bundle) -> str:
    if bundle["neff"] == "none":
        return "this bundle is whole and can generate here; it cannot be loaded on Trainium (neff: none)"
    return "this bundle is whole and can generate here; compile.serve_command says how it is loaded on Trainium"


def main(arguments: list[str]) -> None:
    """Print the summary and the findings; exit 0 only if there are none."""
    parser = argparse.ArgumentParser(prog="python -m compile.doctor", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    about, found = summary(bundle), findings(bundle)
    if options.json:
        print(json.dumps(about | {"generates": not found, "findings": found}, indent=1))
    else:
        for key, value in about.items():
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key + ':':<12}{shown}")
        print("\n".join(f"CANNOT GENERATE: {sentence}" for sentence in found) or _verdict(bundle))
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
