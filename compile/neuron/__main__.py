"""`python -m compile.neuron BUNDLE`: add the files of this machine's SDK to a bundle that was built elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compile.bundle.staging import staged
from compile.neuron.files import add_neffs
from compile.neuron.sdk import makes_neffs
from compile.nxd.files import MODEL, add_model
from compile.spec import Recipe
from model.errors import run_cli
from trnspec.bundle.manifest import manifest_json
from trnspec.bundle.opening import Bundle, read_bundle

# folders of the files that the SDK makes
_OF_SDK = ("neff/", "kernels/", "logs/")


def extend(bundle: Bundle, toolchain: str = "neuron", jobs: int = 0) -> None:
    """Add NEFFs, or NxDI's model.pt; the bundle stays as it was until all files are made."""
    plan, manifest = bundle.plan, bundle.manifest
    makes_neffs(toolchain, plan.spec.kernels)
    with staged(bundle.path) as staging:
        records = {n: f for n, f in bundle.files.items() if not n.startswith(_OF_SDK) and n not in MODEL}
        for name, record in records.items():
            staging.keep(name, record)
        recipe = Recipe(toolchain=toolchain)  # type: ignore[arg-type]
        if toolchain == "model.pt":
            added, compiler = add_model(plan, staging, records, recipe)
        else:
            added, compiler = add_neffs(plan, staging, records, recipe, jobs)
        content = manifest_json(plan, records | added, compiler, manifest.versions, manifest.commit)
        staging.finish(content, {*records, *added})


def main(arguments: list[str]) -> None:
    """Extend a bundle; the last line of stdout is its path."""
    parser = argparse.ArgumentParser(prog="python -m compile.neuron", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--toolchain", choices=("neuron", "model.pt"), default="neuron", help="NEFFs, or NxDI's model")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at a time (default: one per 40 GB of memory)")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    extend(bundle, options.toolchain, options.jobs)
    print(bundle.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
