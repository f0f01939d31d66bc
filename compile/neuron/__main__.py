"""`python -m compile.neuron BUNDLE`: add the files of this machine's SDK to a bundle that was built elsewhere."""

import argparse
import sys
from pathlib import Path

from compile.bundle.staging import staged
from compile.neuron.files import add_compiled, check_toolchain
from compile.nxd.files import MODEL_FILES
from compile.spec import Recipe
from model.errors import UserError, run_cli
from trnspec.bundle.manifest import manifest_json
from trnspec.bundle.opening import Bundle, read_bundle

_OF_SDK = ("neff/", "kernels/", "logs/", *MODEL_FILES)


def extend(bundle: Bundle, jobs: int = 0) -> None:
    """Add NEFFs; the bundle stays as it was until all are made."""
    plan, manifest, recipe = bundle.plan, bundle.manifest, Recipe(toolchain="neuron")
    check_toolchain(recipe.toolchain, plan.spec)
    with staged(bundle.path) as staging:
        records = {name: file for name, file in bundle.files.items() if not name.startswith(_OF_SDK)}
        for name, record in records.items():
            if not staging.reuse(name, record.recipe) and not staging.take(name, record):
                raise UserError(f"{bundle.path} is damaged: {name} does not match the manifest; build it again")
        added, compiler = add_compiled(plan, staging, records, recipe, jobs)
        records |= added
        staging.finish(manifest_json(plan, records, compiler, manifest.versions, manifest.commit))


def main(arguments: list[str]) -> None:
    """Extend a bundle; the last line of stdout is its path."""
    parser = argparse.ArgumentParser(prog="python -m compile.neuron", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once (default: by processors and memory)")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    extend(bundle, options.jobs)
    print(bundle.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
