"""`python -m compile.doctor DIR`: a bundle's summary, whether it is whole, and whether it can generate here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile.neuron.specialise import missing_kernel_files
from compile.report import different_drafters
from compile.serve_command import refusals
from model.errors import UserError, run_cli
from model.graph_key import GraphKey, Stage
from model.weights import shard_file
from trnspec.bundle.contract import declared, violations
from trnspec.bundle.opening import Bundle, damage, read_bundle
from trnspec.bundle.shards import shard_fault
from trnspec.engine.text import TOKENIZER, tokenizer_fault


def findings(bundle: Bundle) -> list[str]:
    """One sentence for each thing that keeps the bundle from generating here."""
    spec, graphs = bundle.spec, {graph.file: graph for graph in bundle.graphs}
    ranks = {shard_file(rank): rank for rank in range(spec.tp)}

    def look(name: str, content: bytearray) -> list[str]:
        if name in graphs:
            return [f"{name}: {clause}" for clause in violations(graphs[name], content, spec)]
        clause = ""
        if name.startswith("kernels/") and name.endswith(".hlo.pb"):
            return [f"{name}: {c}" for c in missing_kernel_files(bytes(content), bundle.files)]
        if name in ranks:
            clause = shard_fault(content, bundle.plan, ranks[name])
        elif name == TOKENIZER:
            clause = tokenizer_fault(content, spec.target_config.vocab_size)
        return [f"{name} {clause}"] if clause else []

    found = [f"{sentence}; build the bundle again or copy it again" for sentence in damage(bundle, look=look)]
    if not bundle.manifest.has_weights:
        found.append("the bundle has no weights; build it from checkpoint folders that hold them")
    elif TOKENIZER not in bundle.files:
        found.append("the bundle has no tokenizer; build it from a checkpoint folder with tokenizer.json")
    return found


def summary(bundle: Bundle) -> dict[str, Any]:
    """The bundle's summary."""
    spec, manifest = bundle.spec, bundle.manifest
    return {
        "models": {role: bundle.title(role) for role in ("target", "draft")},
        "drafter": spec.drafter, "ks": [0, *spec.ks], "rows": spec.rows, "tp": spec.tp, "draft_tp": spec.draft_ranks,
        "batch": spec.batch, "max_len": spec.max_len,
        "buckets": list(spec.buckets), "dtype": spec.dtype, "kernels": spec.kernels,
        "layers": spec.layers, "graphs": len(bundle.graphs),
        "toolchain": manifest.compiler.toolchain, "neff": manifest.compiler.neff,
        "kernels in": manifest.compiler.kernels,
        "weights": f"{spec.tp} ranks" if manifest.has_weights else "none",
        "versions": manifest.versions, "commit": manifest.commit,
        "files": len(bundle.files), "bytes": sum(f.bytes for f in bundle.files.values()),
    }  # fmt: skip


def launches(bundle: Bundle) -> dict[str, int]:
    """How often each kernel is launched by the largest step without filters."""
    spec = bundle.spec
    graph = bundle.plan.by_key[GraphKey(Stage.STEP, spec.k, spec.buckets[-1], filters=False)]
    return dict(sorted(declared(bytes(bundle.read(graph.file))).launches.items()))


def verify(path: str | Path) -> dict[str, Any]:
    """The summary of a bundle that can generate; UserError names the first fault and the number of faults."""
    bundle = read_bundle(Path(path))
    about, found = summary(bundle), findings(bundle)
    if found:
        more = f" (and {len(found) - 1} more; python -m compile.doctor lists them)" if len(found) > 1 else ""
        raise UserError(f"{path} cannot generate: {found[0]}{more}")
    return about


_WAYS = {"nrt": "its NEFFs on nrtpy", "neuron": "its graphs by the SDK's plugin for PJRT"}


def _verdict(bundle: Bundle) -> Iterator[str]:
    yield "this bundle is whole and can generate here"
    why = refusals(bundle)
    for platform, way in _WAYS.items():
        command = f"compile.serve_command --platform {platform}"
        yield f"on Trainium, {way}: {f'no, {why[platform]}' if why[platform] else command}"


def main(arguments: list[str]) -> None:
    """Print the summary and the findings; exit 0 only if there are none."""
    parser = argparse.ArgumentParser(prog="python -m compile.doctor", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    about, found = summary(bundle), findings(bundle)
    if bundle.spec.kernels != "reference" and not any(sentence.startswith("hlo/") for sentence in found):
        about["launches"] = launches(bundle)
    if options.json:
        about |= {"untrained_ks": bundle.spec.untrained_ks, "generates": not found, "findings": found}
        print(json.dumps(about | {"routes": {} if found else refusals(bundle)}, indent=1))
    else:
        for key, value in about.items():
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key + ':':<12}{shown}")
        for said in different_drafters(bundle.spec):
            print(f"the draft was {said}")
        print("\n".join(f"CANNOT GENERATE: {sentence}" for sentence in found) or "\n".join(_verdict(bundle)))
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
