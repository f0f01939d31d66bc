"""The command line of compile.build as one frozen value, checked before the build starts."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from compile.neuron.flags import DEFAULT_FLAGS, flags_of
from compile.tokenizer import check_tokenizers
from model.config import PRESETS, load_config, read_file
from model.drafter import Drafter
from model.drafters.registry import DRAFTERS, infer_drafter, load_draft
from model.errors import UserError, command_line
from model.strict import Length, Range, ValidationError, read, shown
from trnspec.bundle.checkpoint import open_checkpoints, weight_files
from trnspec.bundle.spec import LAYERS, MAX_LAYERS, BundleSpec, spec_from_json

AUTO = "auto"


@dataclass(frozen=True)
class Recipe:
    """Rare fields of a build, a JSON object in the file of --recipe.

    `blocks`: size of the block pool, by default what the batch may need. `chunks`: rows of the prompts' graphs, powers
    of two. `context_buckets`: positions that the graphs of steps attend, rising up to max-len. `graphs`: greedy makes
    the three of a first hour, for requests without filters and logits processors. `layers`: the most layers of a launch
    of NKI kernels, by default 16; 1 launches each half of a layer. `without`: NKI kernels to leave to the compiler.
    `gather`: all_reduce makes each all-gather an all-reduce of zero-padded parts, all_gather leaves it to XLA.
    `toolchain`: auto makes NEFFs if neuronx-cc is installed, cpu makes HLO only, neuron fails without neuronx-cc,
    model.pt makes the file of NxDI's loader instead. `compiler_flags`: a line, or {prefill: line, step: line}.
    """

    blocks: Annotated[int, Range(0, 1 << 24)] = 0
    chunks: Annotated[tuple[int, ...], Length(0, 8), Range(16, 1 << 17)] = ()
    context_buckets: Annotated[tuple[int, ...], Length(0, 8), Range(16, 1 << 20)] = ()
    graphs: Literal["all", "greedy"] = "all"
    layers: Annotated[int, Range(0, MAX_LAYERS)] = 0
    without: Annotated[tuple[str, ...], Length(0, 12)] = ()
    gather: Literal["all_reduce", "all_gather"] = "all_reduce"
    toolchain: Literal["auto", "cpu", "neuron", "model.pt"] = "auto"
    compiler_flags: Annotated[dict[str, str], Length(0, 8)] = field(default_factory=dict)


def _flag(default: Any, help: str, group: str = "build") -> Any:
    return field(default=default, metadata={"help": help, "group": group})


@dataclass(frozen=True)
class BuildSpec:
    """One build; each field is a flag. A folder that holds weights is built with them, all others without."""

    target: str = _flag("Qwen/Qwen3-32B", "a preset's name or a Hugging Face checkpoint folder", "models")
    draft: str = _flag("Qwen/Qwen3-1.7B", "a preset's name or a Hugging Face checkpoint folder", "models")
    drafter: str = _flag(AUTO, f"{', '.join(DRAFTERS)}; auto: by the draft's config.json, none with k 0", "models")
    k: str = _flag(
        AUTO, "drafts per step, 0 to 31, or several as 0,3,7; auto: the drafter's best for the 32B", "models"
    )
    tp: int = _flag(32, "tensor-parallel ranks", "sizes")
    batch: int = _flag(4, "sequences decoded together", "sizes")
    max_len: int = _flag(1024, "positions of a sequence, prompt and output", "sizes")
    dtype: str = _flag("bf16", "bf16 or fp32, of weights, activations and caches", "sizes")
    kernels: str = _flag("nki", "nki (simulated on a CPU) or reference (torch)", "sizes")
    out: str = _flag("bundle", "folder of the bundle")
    weights: str = _flag("dtype", "fp8 (projections of layers, a scale per output channel) or dtype", "sizes")
    recipe: Recipe = _flag(
        Recipe(), f"a JSON object, or its file, of {', '.join(f.name for f in dataclasses.fields(Recipe))}"
    )
    jobs: int = _flag(0, "concurrent neuronx-cc processes; 0: one per processor and 40 GB of free memory")
    dry_run: bool = _flag(False, "print the plan and build nothing")
    json: bool = _flag(False, "print a JSON object instead of text")

    @property
    def drafter_type(self) -> type[Drafter]:
        """The class of the drafter, inferred from the draft's checkpoint where the flag leaves it open."""
        if self.drafter not in (AUTO, *DRAFTERS):
            raise UserError(f"--drafter is {shown(self.drafter)}; give one of {', '.join((AUTO, *DRAFTERS))}")
        if self.drafter != AUTO:
            return DRAFTERS[self.drafter]
        return infer_drafter(self.draft) if self.k == AUTO or ks_of(self.k) else Drafter

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of the fused steps, rising, without 0."""
        return self.drafter_type.default_ks if self.k == AUTO else ks_of(self.k)

    @functools.cached_property
    def bundle(self) -> BundleSpec:
        """Everything that the bundle's content depends on but the weights; UserError for a model that is not there."""
        target, drafter = load_config(self.target), self.drafter_type
        return BundleSpec(
            target=model_name(self.target), target_config=target, tp=self.tp, ks=self.ks, batch=self.batch,
            max_len=self.max_len, dtype=self.dtype, kernels=self.kernels, drafter=drafter.name,  # type: ignore[arg-type]
            draft=model_name(self.draft) if drafter.config_type else "none",
            draft_config=load_draft(drafter, self.draft, target) if drafter.config_type else None,
            blocks=self.recipe.blocks, chunks=self.recipe.chunks, context_buckets=self.recipe.context_buckets,
            graphs=self.recipe.graphs, without=self.recipe.without, gather=self.recipe.gather,
            weights=self.weights,  # type: ignore[arg-type]
            layers=self.recipe.layers or (LAYERS if self.kernels == "nki" else 1),
        )  # fmt: skip

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Folder of each model's weights, by its role; empty for a build without weights."""
        folders = {"target": self.target} | ({"draft": self.draft} if self.drafter_type.config_type else {})
        return {role: Path(folder) for role, folder in folders.items()} if _has_weights(self.target) else {}

    def check(self) -> None:
        """Raise UserError with one sentence for the first thing that cannot be built."""
        bundle, drafter = self.bundle, self.drafter_type
        try:
            spec_from_json(bundle.as_json(), "").check()
        except ValidationError as wrong:
            raise UserError(f"{wrong}; correct it and run the command again") from wrong
        flags_of(self.recipe.compiler_flags)
        if "://" in self.out or self.out.startswith("s3:"):
            raise UserError(f"--out is {self.out}; give a local folder, and push it: python -m compile.store push")
        if not drafter.config_type and self.draft != BuildSpec.draft:
            why = f"the drafter {drafter.name} has no model" if bundle.k else "k is 0, which builds no draft"
            raise UserError(f"{why}, and --draft was given; leave it out{'' if bundle.k else ', or raise k'}")
        if drafter.config_type and _has_weights(self.target) != _has_weights(self.draft):
            with_, without = (self.target, self.draft) if _has_weights(self.target) else (self.draft, self.target)
            raise UserError(
                f"{with_} holds weights and {without} holds none; give two checkpoints with weights, or two without"
            )
        if self.checkpoints:
            open_checkpoints(bundle.parts, self.checkpoints)
            check_tokenizers(self.checkpoints["target"], bundle.target_config.vocab_size,
                             self.checkpoints["draft"] if drafter.is_causal_lm else None)  # fmt: skip

    def notes(self) -> list[str]:
        """What a bundle of this spec lacks, and what of its checkpoint has no effect, in sentences."""
        scaling = self.bundle.target_config.rope_scaling
        lacks_weights = [f"{self.target} has no weights: this bundle has graphs only"] * (not self.checkpoints)
        not_applied = "rope_scaling.attn_factor is not applied, as in vLLM 0.32; attention_factor would be"
        return lacks_weights + [f"{self.target}: {not_applied}"] * bool(scaling and scaling.attn_factor)


def _has_weights(name_or_path: str) -> bool:
    return name_or_path not in PRESETS and bool(weight_files(Path(name_or_path)))


def ks_of(text: str) -> tuple[int, ...]:
    """The k of a text as 7 or 0,3,7, ascending and without 0, which every bundle has."""
    try:
        return tuple(sorted({int(part) for part in str(text).split(",")} - {0}))
    except ValueError as error:
        raise UserError(f"--k is {shown(text)}; give a number from 0 to 31, or several as 0,3,7") from error


def model_name(name_or_path: str) -> str:
    """A preset's name, or the name of a folder: the bundle must not depend on this machine's paths."""
    if name_or_path in PRESETS or not Path(name_or_path).is_dir():
        return name_or_path
    folder = Path(name_or_path).resolve()
    # the hub's cache: models--Qwen--Qwen3-32B/snapshots/<revision>
    hub = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    return hub.removeprefix("models--").replace("--", "/", 1) if hub.startswith("models--") else folder.name


def read_recipe(file: str) -> Recipe:
    """The recipe of a JSON object, or of a file that holds one; UserError names the first wrong field."""
    try:
        value = json.loads(file if file.startswith("{") else read_file(Path(file)))
        if isinstance(value, dict) and isinstance(line := value.get("compiler_flags"), str):
            value["compiler_flags"] = dict.fromkeys(DEFAULT_FLAGS, line)
        return read(Recipe, value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a recipe: {error}; correct it") from error


def parse(arguments: Sequence[str] | None = None) -> BuildSpec:
    """The command line as a BuildSpec; each flag is a field with its default and help."""
    does = "Build a bundle: the graphs of a Qwen3 target and its draft, and their weights if there are any."
    parser = command_line("compile.build", does, "--target Qwen3-8B --draft Qwen3-0.6B --tp 8 --k 3 --out bundles/8b")
    groups = {name: parser.add_argument_group(name) for name in ("models", "sizes", "build")}
    hints = get_type_hints(BuildSpec) | {"recipe": read_recipe}
    for f in dataclasses.fields(BuildSpec):
        name, text = "--" + f.name.replace("_", "-"), f.metadata["help"]
        if hints[f.name] is bool:
            groups[f.metadata["group"]].add_argument(name, action="store_true", help=text)
        else:
            default = "" if f.name == "recipe" else f" (default: {f.default!r})"
            groups[f.metadata["group"]].add_argument(name, type=hints[f.name], default=f.default, help=text + default)
    return BuildSpec(**vars(parser.parse_args(arguments)))
