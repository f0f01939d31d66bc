"""`python -m compile.neuron BUNDLE`: compile a bundle's graphs for Trainium with this machine's neuronx-cc."""

import sys
from pathlib import Path

from compile.bundle.staging import staged
from compile.neuron.files import add_compiled, check_toolchain
from compile.nxd.files import MODEL_FILES
from compile.spec import Recipe
from model.errors import UserError, command_line, run_cli
from trnspec.bundle.manifest import manifest_json
from trnspec.bundle.opening import Bundle, read_bundle

_OF_SDK = ("neff/", "kernels/", "logs/", *MODEL_FILES)


def extend(bundle: Bundle, jobs: int = 0) -> None:
    """Add NEFFs to a bundle, which does not change until all are compiled."""
    plan, manifest, recipe = bundle.plan, bundle.manifest, Recipe(toolchain="neuron")
    check_toolchain(recipe.toolchain, plan.spec)
    with staged(bundle.path) as staging:
        records = {name: file for name, file in bundle.files.items() if not name.startswith(_OF_SDK)}
        for name, record in records.items():
            if not staging.reuse(name, record.recipe) and not staging.take(name, record):
                raise UserError(f"{bundle.path} is corrupt: {name} does not match the manifest; build it again")
        added, compiler = add_compiled(plan, staging, records, recipe, jobs)
        records |= added
        staging.finish(manifest_json(plan, records, compiler, manifest.versions, manifest.commit))


def main(arguments: list[str]) -> None:
    """Extend a bundle; the last line of stdout is its path."""
    does = "Compile the graphs of a bundle to NEFFs with this machine's neuronx-cc."
    parser = command_line("compile.neuron", does, "bundles/full --jobs 4")
    parser.add_argument("bundle", type=Path, help="folder of the bundle, which is replaced when all are compiled")
    parser.add_argument("--jobs", type=int, default=0, help="concurrent compilers (default: by processors and memory)")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    extend(bundle, options.jobs)
    print(bundle.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
