"""`python -m compile.doctor DIR`: a bundle's plan and contents, whether it is complete and can generate here."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile.report import plan_as_json, plan_as_text
from model.errors import command_line, run_cli
from model.weights import shard_file
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle, corrupt_files, open_regular, read_bundle
from trnspec.bundle.shards import shard_header
from trnspec.bundle.tokenizer import TOKENIZER, tokenizer_fault


def verify(folder: str | Path) -> list[str]:
    """One sentence for each thing that keeps the bundle in a folder from generating here."""
    return findings(read_bundle(Path(folder)))


def findings(bundle: Bundle) -> list[str]:
    """One sentence for each thing that keeps the bundle from generating here."""
    faults = corrupt_files(bundle) or _faults(bundle)
    sentences = [f"{clause}; build the bundle again or copy it again" for clause in faults]
    if not bundle.manifest.has_weights:
        sentences.append("the bundle has no weights; build it from checkpoint folders that hold them")
    elif TOKENIZER not in bundle.files:
        sentences.append("the bundle has no tokenizer; build it from a checkpoint folder with tokenizer.json")
    return sentences


def _faults(bundle: Bundle) -> Iterator[str]:
    """Files that match the manifest and do not match the plan."""
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
    """What the bundle contains, and what it was built with."""
    manifest, compiler = bundle.manifest, bundle.manifest.compiler
    return {
        "toolchain": compiler.toolchain, "neff": compiler.neff, "kernels in": compiler.kernels,
        "weights": f"{bundle.spec.tp} ranks" if manifest.has_weights else "none", "versions": manifest.versions,
        "commit": manifest.commit, "files": len(bundle.files), "bytes": sum(f.bytes for f in bundle.files.values()),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the plan, the contents and the findings; exit 1 if there are findings."""
    does = "Verify every file of a bundle and print its plan, its contents and what keeps it from generating."
    parser = command_line("compile.doctor", does, "bundles/demo")
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    about, faults = contents(bundle), findings(bundle)
    if options.json:
        about |= plan_as_json(bundle.plan) | {"generates": not faults, "findings": faults}
        print(json.dumps(about, indent=1))
    else:
        print(plan_as_text(bundle.plan))
        for key, value in about.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key + ':':<12}{text}")
        print("\n".join(f"CANNOT GENERATE: {f}" for f in faults) or "this bundle is complete and can generate here")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
