"""manifest.json: a bundle's spec, its files and how they were made, checked before any of it is used.

A bundle is safetensors, HLO protos, JSON and text: nothing in it is unpickled or executed by us.
"""

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from model.errors import UserError
from model.graph_key import GraphKey
from model.graph_spec import TensorSpec
from model.nki.launches import LNC
from model.strict import Length, Range, Text, ValidationError, read, shown
from model.weights import shard_file
from trnspec.bundle.plan import BundlePlan, make_plan
from trnspec.bundle.shards import shard_header
from trnspec.bundle.spec import Name, spec_from_json

FORMAT, FORMAT_VERSION = "trnspec-bundle", 4
MANIFEST, MANIFEST_BYTES = "manifest.json", 16 << 20
# the folders and files of a bundle -> the largest size of a file there; a shard's size follows from the plan
FOLDERS = {"hlo": 1 << 28, "neff": 1 << 34, "kernels": 1 << 28, "logs": 1 << 28, "weights": 0, "tokenizer": 1 << 27}
FILES = {"neuron_config.json": 1 << 20, "model.pt": 1 << 38}
# the kinds of graph that it lists flags for, and neuronx-cc's default ones.
# Source: compiler/neuronx-cc/api-reference-guide of SDK 2.32, where -O2 is the default
PREFILL, STEP = "prefill", "step"
PLAIN: Final = "--model-type transformer --auto-cast none -O2"
_Digest = Annotated[str, Text(r"[0-9a-f]{64}", "a sha256")]
# no name leads out of the folder, or is that of a file under construction
_PART = r"\w[\w.-]{0,120}(?<!\.tmp)"
_FileName = Annotated[str, Text(rf"(?a:(?:{_PART}/){{0,3}}{_PART})", "a file of a bundle")]
_Names = Annotated[dict[str, Name], Length(0, 100)]


@dataclass(frozen=True)
class File:
    """A file of a bundle: the hash of its inputs, its digest and its size."""

    recipe: _Digest
    sha256: _Digest
    bytes: Annotated[int, Range(0, 1 << 50)]


@dataclass(frozen=True)
class Compiler:
    """The Neuron SDK's files: `neff` is none, neff (a NEFF for each graph) or model.pt (for NxDI's loader); `kernels`
    says where the compiled NKI kernels of the graphs are: nowhere, or as IR in kernels/."""

    toolchain: Literal["cpu", "compiler", "full"] = "cpu"
    neff: Literal["none", "neff", "model.pt"] = "none"
    target: Name = "none"
    lnc: Literal[0, 1, 2] = 0
    flags: Annotated[dict[str, str], Length(0, 8)] = dataclasses.field(default_factory=dict)
    versions: _Names = dataclasses.field(default_factory=dict)
    kernels: Literal["none", "bir"] = "none"


@dataclass(frozen=True)
class _ManifestJson:
    graphs: Annotated[dict[_FileName, _Digest], Length(1, 4096)]
    files: Annotated[dict[_FileName, File], Length(1, 10_000)]
    versions: _Names
    commit: Name | None
    compiler: Compiler


@dataclass(frozen=True)
class Manifest(_ManifestJson):
    """A checked manifest: the files by name, how they were made, the plan of its spec, its own digest."""

    plan: BundlePlan
    digest: str

    def __str__(self) -> str:
        spec, size = self.plan.spec, sum(entry.bytes for entry in self.files.values()) / 1e9
        return f"{spec.target} + {spec.draft}, tp {spec.tp}, k {spec.k}, {size:.2f} GB, neff {self.compiler.neff}"

    @property
    def has_weights(self) -> bool:
        """Whether every rank has its weights."""
        return shard_file(0) in self.files

    @property
    def without_kernels(self) -> str:
        """Why no device can run the graphs, if they call NKI kernels that were compiled for none; else empty."""
        calls = self.plan.spec.kernels != "reference" and self.compiler.kernels == "none"
        return calls * (
            "its graphs call NKI kernels that were compiled for no device (kernels: none); build it on a machine with "
            "neuronx-cc and nki, or with --kernels reference"
        )


def flag_tag(key: GraphKey) -> str:
    """The kind of graph, by which a manifest lists flags."""
    return PREFILL if key.is_prefill else STEP


def with_lnc(flags: str, lnc: int | str = LNC) -> str:
    """The flags with the cores of a logical core, where they do not say it."""
    return flags if "--lnc" in flags or "--logical-nc-config" in flags else f"{flags} --lnc {lnc}"


def manifest_json(
    plan: BundlePlan, files: dict[str, File], compiler: Compiler, versions: dict[str, str], commit: str | None
) -> bytes:
    made = _ManifestJson(graph_digests(plan), files, versions, commit, compiler)
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "spec": plan.spec.as_json()}
    value = head | dataclasses.asdict(made)
    return (json.dumps(value | {"manifest_sha256": canonical_hash(value)}, indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(content: bytes, file: str) -> Manifest:
    """The manifest of these bytes; UserError, naming the file, if a build did not write them.

    Untrusted: size, digest, types, ranges and the spec are checked; all else follows from a new plan of the spec.
    """
    try:
        raw: Any = json.loads(content.decode("utf-8")) if len(content) <= MANIFEST_BYTES else None
        version = raw.pop("format_version") if raw["format"] == FORMAT else None
        digest = raw.pop("manifest_sha256", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a bundle's manifest ({type(error).__name__}); build it again") from error
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(f"{file} has format {shown(version)}, this version reads {FORMAT_VERSION}; build it again")
    if canonical_hash(raw | {"format_version": version}) != digest:
        raise UserError(f"{file} was changed after it was written (its own digest differs); build or copy it again")
    try:
        spec = spec_from_json(raw.pop("spec", None))
        spec.check()
        stored, plan = read(_ManifestJson, {n: v for n, v in raw.items() if n != "format"}), make_plan(spec)
        if stored.graphs != graph_digests(plan):
            raise ValidationError("its graphs are not those that this version plans for its spec")
        if (stored.compiler.neff == "none") != (stored.compiler.toolchain == "cpu"):
            raise ValidationError(f"it has neff {stored.compiler.neff} with toolchain {stored.compiler.toolchain}")
        _check_files(stored.files, plan, stored.compiler)
        return Manifest(**vars(stored), plan=plan, digest=digest)
    except (ValidationError, UserError, RecursionError) as wrong:
        raise UserError(f"{file} was not written by a build: {wrong}; build the bundle again") from wrong


def _check_files(files: dict[str, File], plan: BundlePlan, compiler: Compiler) -> None:
    """Raise ValidationError unless files are those of a plan and a build writes such sizes."""
    shards = {shard_file(rank): rank for rank in range(plan.spec.tp)}
    needed = {graph.file for graph in plan.graphs} | (FILES.keys() if compiler.neff == "model.pt" else set())
    needed |= shards.keys() if shards.keys() & files.keys() else set()
    if missing := sorted(needed - files.keys()):
        raise ValidationError(f"files lacks {missing[0]}")
    for name, entry in sorted(files.items()):
        folder = name.partition("/")[0]
        limit = FILES.get(name) or FOLDERS.get(folder, 0) * (name != folder)
        if name not in needed and (not limit or folder == "hlo"):
            raise ValidationError(f"files has {name}, which no build of its spec writes")
        if name in shards and entry.bytes != (size := len(shard_header(plan, shards[name])) + plan.weight_bytes):
            raise ValidationError(f"{name} has {entry.bytes} bytes, its tensors need {size}")
        if name not in shards and entry.bytes > limit:
            raise ValidationError(f"{name} has {entry.bytes} bytes, at most {limit} are supported")


def graph_digests(plan: BundlePlan) -> dict[str, str]:
    """The file of each graph -> the digest of everything that is planned for it."""
    return {
        g.file: canonical_hash([g.key, plan.spec.kernels, *map(_digest, (g.weights, g.inputs, g.state, g.outputs))])
        for g in plan.graphs
    }


# most graphs share their weights, which are thousands of rows
@functools.lru_cache(maxsize=32)
def _digest(tensors: tuple[TensorSpec, ...]) -> str:
    return canonical_hash([vars(tensor) for tensor in tensors])


def sha256_of(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_hash(value: Any) -> str:
    """The sha256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
