"""`python -m compile.doctor DIR`: a bundle's summary, whether it is whole, and whether it can generate here."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile.report import hbm_text, untrained_k_warnings
from compile.serve_command import refusals
from model.errors import run_cli
from model.weights import shard_file
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle, damage, open_regular, read_bundle
from trnspec.bundle.shards import shard_header
from trnspec.engine.text import TOKENIZER, tokenizer_fault


def verify(folder: str | Path) -> list[str]:
    """One sentence for each thing that keeps the bundle in a folder from generating here."""
    return findings(read_bundle(Path(folder)))


def findings(bundle: Bundle) -> list[str]:
    """One sentence for each thing that keeps the bundle from generating here."""
    found = [f"{clause}; build the bundle again or copy it again" for clause in damage(bundle) or _faults(bundle)]
    if not bundle.manifest.has_weights:
        found.append("the bundle has no weights; build it from checkpoint folders that hold them")
    elif TOKENIZER not in bundle.files:
        found.append("the bundle has no tokenizer; build it from a checkpoint folder with tokenizer.json")
    return found


def _faults(bundle: Bundle) -> Iterator[str]:
    """Files that are as the manifest says, and still not what the plan says."""
    for graph in bundle.graphs:
        yield from (f"{graph.file} {s}" for s in violations(graph, bundle.read(graph.file), bundle.spec))
    for rank in range(bundle.spec.tp if bundle.manifest.has_weights else 0):
        header = shard_header(bundle.plan, rank)
        with open_regular(shard_file(rank), bundle.folder) as file:
            if file.read(len(header)) != header:
                yield f"{shard_file(rank)} was cut for another model, rank or layout"
    for name in bundle.files:
        if name == TOKENIZER and (clause := tokenizer_fault(bundle.read(name), bundle.spec.target_config.vocab_size)):
            yield f"{name} {clause}"


def summary(bundle: Bundle) -> dict[str, Any]:
    """The bundle's summary."""
    spec, manifest = bundle.spec, bundle.manifest
    return {
        "models": {role: getattr(spec, role) for role in ("target", "draft")},
        "drafter": spec.drafter, "ks": [0, *spec.ks], "rows": spec.rows, "tp": spec.tp, "batch": spec.batch,
        "max_len": spec.max_len, "buckets": list(spec.buckets), "dtype": spec.dtype, "kernels": spec.kernels,
        "layers": spec.layers, "graphs": len(bundle.graphs),
        "toolchain": manifest.compiler.toolchain, "neff": manifest.compiler.neff,
        "kernels in": manifest.compiler.kernels, "weights": f"{spec.tp} ranks" if manifest.has_weights else "none",
        "versions": manifest.versions, "commit": manifest.commit,
        "HBM of a rank": hbm_text(bundle.plan),
        "files": len(bundle.files), "bytes": sum(f.bytes for f in bundle.files.values()),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the summary and the findings; exit 0 only if there are none."""
    parser = argparse.ArgumentParser(prog="python -m compile.doctor", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    about, found, routes = summary(bundle), findings(bundle), refusals(bundle)
    if options.json:
        about |= {"untrained_ks": bundle.spec.untrained_ks, "generates": not found, "findings": found}
        print(json.dumps(about | {"routes": {} if found else routes}, indent=1))
    else:
        for key, value in about.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key + ':':<12}{text}")
        for warning in untrained_k_warnings(bundle.spec):
            print(f"the draft was {warning}")
        print("\n".join(f"CANNOT GENERATE: {f}" for f in found) or "this bundle is whole and can generate here")
        for platform, why in {} if found else routes.items():
            print(f"on {platform}: {f'no, {why}' if why else f'python -m compile.serve_command --platform {platform}'}")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
