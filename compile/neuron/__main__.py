"""`python -m compile.neuron BUNDLE`: add the files of this machine's SDK to a bundle that was built elsewhere.

model.pt needs torch, the SDK's packages and nothing else: neither jax nor torchax, whose versions the SDK decides.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compile.bundle.staging import StagedFile, staged
from compile.neuron.files import compiled, kernel_files
from compile.spec import Recipe
from model.errors import run_cli
from trnspec.bundle.manifest import manifest_json
from trnspec.bundle.opening import Bundle, read_bundle


def extend(bundle: Bundle) -> None:
    """Add model.pt, or NEFFs where the compiler is alone; the bundle is served as it was until all are made."""
    with staged(bundle.path) as staging:
        graphs = [_as_is(g.file, bundle.files[g.file].recipe) for g in bundle.graphs]
        files, compiler = compiled(bundle.plan, staging.folder, graphs, Recipe(toolchain="neuron"))
        records = dict(bundle.files)
        for name in records.keys() - {f.name for f in files}:
            staging.keep(name, records[name])
        if [f for f in files if not staging.finished(f)]:
            staging.begin()
        for file in files:
            records[file.name] = staging.finished(file) or staging.make(file)
        for file in kernel_files(staging, files):
            records[file.name] = staging.finished(file) or staging.make(file)
        manifest = bundle.manifest
        content = manifest_json(bundle.plan, records, compiler, manifest.versions, manifest.commit)
        staging.finish(content, set(records))


def _as_is(name: str, recipe: str) -> StagedFile:
    def kept(path: Path) -> None:
        raise AssertionError(f"{name} is in the bundle")

    return StagedFile(name, recipe, kept)


def main(arguments: list[str]) -> None:
    """Extend a bundle; the last line of stdout is its path."""
    parser = argparse.ArgumentParser(prog="python -m compile.neuron", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    bundle = read_bundle(parser.parse_args(arguments).bundle)
    extend(bundle)
    print(bundle.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
