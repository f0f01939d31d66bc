"""`python -m compile.doctor DIR`: a bundle's plan and contents, whether it is complete and can generate here."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile.report import plan_as_json, plan_as_text
from model.errors import run_cli
from model.weights import shard_file
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle, damage, open_regular, read_bundle
from trnspec.bundle.shards import shard_header
from trnspec.bundle.tokenizer import TOKENIZER, tokenizer_fault


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


def contents(bundle: Bundle) -> dict[str, Any]:
    """What a bundle has of its plan."""
    manifest, compiler = bundle.manifest, bundle.manifest.compiler
    return {
        "toolchain": compiler.toolchain, "neff": compiler.neff, "kernels in": compiler.kernels,
        "weights": f"{bundle.spec.tp} ranks" if manifest.has_weights else "none", "versions": manifest.versions,
        "commit": manifest.commit, "files": len(bundle.files), "bytes": sum(f.bytes for f in bundle.files.values()),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the plan, the contents and the findings; exit 0 only if there are none."""
    parser = argparse.ArgumentParser(prog="python -m compile.doctor", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    about, found = contents(bundle), findings(bundle)
    if options.json:
        about |= plan_as_json(bundle.plan) | {"generates": not found, "findings": found}
        print(json.dumps(about, indent=1))
    else:
        print(plan_as_text(bundle.plan))
        for key, value in about.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key + ':':<12}{text}")
        print("\n".join(f"CANNOT GENERATE: {f}" for f in found) or "this bundle is whole and can generate here")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
