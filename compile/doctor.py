"""`python -m compile.doctor DIR`: a bundle's summary, whether it is whole, and whether it can generate here."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from compile.neuron.specialise import missing_kernel_files
from compile.report import untrained_k_warnings
from compile.serve_command import refusals
from model.errors import UserError, run_cli
from model.weights import shard_file
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle, Check, damage, read_bundle
from trnspec.bundle.shards import shard_fault
from trnspec.engine.text import TOKENIZER, tokenizer_fault


def findings(bundle: Bundle) -> list[str]:
    """One sentence for each thing that keeps the bundle from generating here."""
    spec, plan = bundle.spec, bundle.plan
    checks: dict[str, Check] = {g.file: functools.partial(violations, g, spec=spec) for g in plan.graphs}
    for rank in range(spec.tp):
        checks[shard_file(rank)] = lambda content, rank=rank: filter(None, [shard_fault(content, plan, rank)])  # type: ignore[misc]
    checks[TOKENIZER] = lambda content: filter(None, [tokenizer_fault(content, spec.target_config.vocab_size)])
    for name in bundle.files:
        if name.startswith("kernels/") and name.endswith(".hlo.pb"):
            checks[name] = lambda content: missing_kernel_files(bytes(content), bundle.files)
    found = [f"{sentence}; build the bundle again or copy it again" for sentence in damage(bundle, checks=checks)]
    if not bundle.manifest.has_weights:
        found.append("the bundle has no weights; build it from checkpoint folders that hold them")
    elif TOKENIZER not in bundle.files:
        found.append("the bundle has no tokenizer; build it from a checkpoint folder with tokenizer.json")
    return found


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
        "files": len(bundle.files), "bytes": sum(f.bytes for f in bundle.files.values()),
    }  # fmt: skip


def verify(path: str | Path) -> dict[str, Any]:
    """The summary of a bundle that can generate; UserError names the first fault and the number of faults."""
    bundle = read_bundle(Path(path))
    if found := findings(bundle):
        more = f" (and {len(found) - 1} more; python -m compile.doctor lists them)" if len(found) > 1 else ""
        raise UserError(f"{path} cannot generate: {found[0]}{more}")
    return summary(bundle)


_WAYS = {"nrt": "its NEFFs on nrtpy", "neuron": "its graphs by the SDK's plugin for PJRT"}


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
        for platform, way in () if found else _WAYS.items():
            why = f"no, {routes[platform]}" if routes[platform] else f"compile.serve_command --platform {platform}"
            print(f"on Trainium, {way}: {why}")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
