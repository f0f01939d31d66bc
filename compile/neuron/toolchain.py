"""What a build gets by its recipe's toolchain: NEFFs by neuronx-cc, model.pt by NxD's ModelBuilder, or neither."""

from __future__ import annotations

from collections.abc import Mapping

from compile.bundle.staging import Staging
from compile.neuron import sdk
from compile.neuron.files import add_neffs
from compile.nxd import files as nxd
from compile.spec import Recipe
from model.errors import UserError
from trnspec.bundle.manifest import Compiler, File
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec


def check(toolchain: str, spec: BundleSpec) -> None:
    """Raise UserError if this machine lacks what a toolchain needs that is named: neuron or model.pt."""
    if toolchain == nxd.MODEL:
        nxd.check(spec)
    elif toolchain == "neuron" and (why := sdk.missing(spec.kernels != "reference")):
        raise UserError(f"this bundle gets no NEFFs: {why}")


def add_compiled(
    plan: BundlePlan, staging: Staging, records: Mapping[str, File], recipe: Recipe, jobs: int = 0
) -> tuple[dict[str, File], Compiler]:
    """The records of what the SDK adds to a staged bundle whose other files are made, and the manifest's entry."""
    if recipe.toolchain == nxd.MODEL:
        return nxd.add_model(plan, staging, records, recipe)
    if recipe.toolchain == "cpu" or sdk.missing(plan.spec.kernels != "reference"):
        return {}, Compiler()
    return add_neffs(plan, staging, records, recipe, jobs)
