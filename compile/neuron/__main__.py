"""`python -m compile.neuron BUNDLE`: add what the SDK of this machine makes to a bundle that was built elsewhere.

model.pt needs torch, the SDK's packages and nothing else: neither jax nor torchax, whose versions the SDK decides.
With --executables PLATFORM each graph is compiled by that PJRT plugin instead, and loaded from the bundle from then on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile.bundle.staging import Record, StagedFile, Staging
from compile.neuron.files import compiled
from compile.plan import make_plan
from compile.spec import BuildSpec
from model.bundle.manifest import Bundle, GraphSpec, canonical_hash, graph_as_json, read_bundle
from model.config import Qwen3Config
from model.draft_config import DraftConfig
from model.drafting import Drafting
from model.errors import UserError, run_cli


@dataclass(frozen=True)
class SpecOfBundle(BuildSpec):
    """The spec that a bundle was built by; drafter and sizes come from its manifest, not from the models' folders."""

    bundle: Bundle = dataclasses.field(kw_only=True, metadata={"help": "", "how": True})

    @property
    def drafting(self) -> Drafting:
        return self.bundle.drafting

    @property
    def target_config(self) -> Qwen3Config:
        return self.bundle.config("target")

    @property
    def draft_config(self) -> DraftConfig:
        return self.bundle.config("draft")


def spec_of(bundle: Bundle) -> SpecOfBundle:
    """The spec of a bundle; UserError if this version of the project plans other graphs for it."""
    named = {f.name for f in dataclasses.fields(BuildSpec)}
    # where a bundle does not say, the draft's head is in its groups
    values = {"draft_head": "group"} | {n: v for n, v in bundle["spec"].items() if n in named}
    values["fewer"] = bundle.ks[1:-1]
    spec = SpecOfBundle(**values, out=str(bundle.path), toolchain="neuron", bundle=bundle)
    planned = [json.loads(json.dumps(graph_as_json(g))) for g in make_plan(spec).graphs]
    if planned != bundle["graphs"]:
        raise UserError(f"{bundle.path} was built by a version that plans other graphs; build it again with this one")
    return spec


def extend(bundle: Bundle, files: list[StagedFile], changes: dict[str, Any]) -> None:
    """Make files and list them in the manifest; the bundle is served as it was until all are made."""
    staging = Staging(bundle.path)
    fields = {f.name for f in dataclasses.fields(Record)}
    records = {n: Record(**{f: e[f] for f in fields}) for n, e in bundle["files"].items()}
    for name in records.keys() - {f.name for f in files}:
        staging.keep(name, records[name])
    due = [f for f in files if not staging.finished(f)]
    if due:
        staging.begin()
    for file in files:
        records[file.name] = staging.finished(file) or staging.make(file)
    staging.finish({k: v for k, v in bundle.manifest.items() if k not in _OF_FINISH} | changes, records)


_OF_FINISH = ("files", "manifest_sha256")


def add_model(bundle: Bundle) -> None:
    """model.pt, or NEFFs where the compiler is alone."""
    graphs = [_as_is(n, e["recipe"]) for n, e in bundle["files"].items() if n.startswith("hlo/")]
    files, changes = compiled(make_plan(spec_of(bundle)), graphs)
    extend(bundle, files, changes)


def _as_is(name: str, recipe: str) -> StagedFile:
    def kept(path: Path) -> None:
        raise AssertionError(f"{name} is in the bundle")

    return StagedFile(name, recipe, kept)


def add_executables(bundle: Bundle, platform: str) -> None:
    """Every graph compiled by the PJRT plugin of a platform, as the plugin serializes it."""
    # jax, which a machine that makes model.pt need not have
    from model.serving import pjrt  # noqa: PLC0415

    stamp = pjrt.stamp(platform, bundle["tp"])

    def writer(graph: GraphSpec) -> Callable[[Path], None]:
        return lambda path: pjrt.write(bundle, graph, platform, path)

    files = [
        StagedFile(pjrt.name_of(g), canonical_hash([stamp, bundle["files"][g.file]["sha256"]]), writer(g))
        for g in bundle.graphs
    ]
    extend(bundle, files, {"executables": stamp})


def main(arguments: list[str]) -> None:
    """Extend a bundle; the last line of stdout is its path."""
    parser = argparse.ArgumentParser(prog="python -m compile.neuron", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument(
        "--executables", metavar="PLATFORM", help="compile the graphs by this PJRT plugin: neuron or cpu"
    )
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    if options.executables:
        add_executables(bundle, options.executables)
    else:
        add_model(bundle)
    print(bundle.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
