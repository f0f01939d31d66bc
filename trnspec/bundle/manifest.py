"""manifest.json: a bundle's spec, its files, and how they were made; checked whole before any use.

safetensors, HLO protos and JSON only: nothing in a bundle is unpickled or executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from model.errors import UserError
from model.graph_spec import GraphSpec, TensorSpec
from model.strict import Length, Range, Text, Wrong, read, shown
from model.weights import shard_file
from trnspec.bundle.plan import BundlePlan, make_plan
from trnspec.bundle.spec import MAX_TP, BundleSpec, Name, spec_from_json

FORMAT = "trnspec-bundle"
FORMAT_VERSION = 3
MANIFEST = "manifest.json"
# all that a build writes, and all that a manifest may list
FOLDERS = ("hlo", "neff", "kernels", "logs", "weights", "tokenizer")
_FILES = ("model.pt", "neuron_config.json")
# the largest manifest that is read
MANIFEST_BYTES = 16 << 20
_PIECE = 1 << 20
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}/){0,3}[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}").fullmatch
_Digest = Annotated[str, Text(r"[0-9a-f]{64}", "a sha256")]
_FileName = Annotated[str, Text(r"[A-Za-z0-9_./-]{1,500}", "a file's name")]
_Names = Annotated[dict[str, Name], Length(0, 100)]


@dataclass(frozen=True)
class File:
    """A file of a bundle: the hash of its inputs, its digest and its size."""

    recipe: _Digest
    sha256: _Digest
    bytes: Annotated[int, Range(0, 1 << 50)]


@dataclass(frozen=True)
class Compiler:
    """The Neuron SDK's files: `neff` is none, neff (files of single graphs) or model.pt (for NxDI's loader).

    `kernels` says where a device finds the NKI kernels that the graphs call: nowhere, or as IR beside the NEFFs.
    """

    toolchain: Literal["cpu", "compiler", "full"] = "cpu"
    neff: Literal["none", "neff", "model.pt"] = "none"
    target: Name = "none"
    lnc: Literal[0, 1, 2] = 0
    flags: Annotated[dict[str, str], Length(0, 8)] = dataclasses.field(default_factory=dict)
    versions: _Names = dataclasses.field(default_factory=dict)
    kernels: Literal["none", "bir"] = "none"


@dataclass(frozen=True)
class _Stored:
    """The manifest without its format and its spec, which `spec_from_json` reads."""

    graphs: Annotated[dict[_FileName, _Digest], Length(1, 4096)]
    files: Annotated[dict[_FileName, File], Length(1, 10_000)]
    versions: _Names
    commit: Name | None
    compiler: Compiler


@dataclass(frozen=True)
class Manifest:
    """A checked manifest: the spec, the plan of it, the files by name, how they were made, its own digest."""

    spec: BundleSpec
    plan: BundlePlan
    files: dict[str, File]
    compiler: Compiler
    versions: dict[str, str]
    commit: str | None
    digest: str

    @property
    def has_weights(self) -> bool:
        """Whether every rank has its weights."""
        return shard_file(0) in self.files

    @property
    def without_kernels(self) -> str:
        """Why no device can run the graphs, if they call kernels that were compiled for none; else empty."""
        if self.spec.kernels == "reference" or self.compiler.kernels != "none":
            return ""
        return (
            "its graphs call NKI kernels that were compiled for no device (kernels: none); build it on a machine with "
            "neuronx-cc and nki, or with --kernels reference"
        )

    def title(self, role: str) -> str:
        """A model's name for people, with its size where the name is a folder's, which may be any word."""
        part = next((p for p in self.spec.parts if p.role == role), None)
        if part is None or "/" in part.name:
            return part.name if part else "none"
        count = part.config.parameter_count
        return f"{part.name} ({next((f'{count / unit:.1f}{sign}' for unit, sign in _UNITS if count >= unit), count)})"


def manifest_json(
    plan: BundlePlan, files: dict[str, File], compiler: Compiler, versions: dict[str, str], commit: str | None
) -> bytes:
    """The bytes of a bundle's manifest."""
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "spec": plan.spec.as_json(),
        "graphs": graph_digests(plan),
        "files": {name: dataclasses.asdict(file) for name, file in sorted(files.items())},
        "compiler": dataclasses.asdict(compiler),
        "versions": versions,
        "commit": commit,
    }
    value["manifest_sha256"] = canonical_hash(value)
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(content: bytes, file: str) -> Manifest:
    """The manifest of these bytes; UserError, naming the file, if a build did not write them.

    A manifest is untrusted: its size, its own digest, every type and range are checked, the spec is checked as a
    build checks its own, and everything else a loader uses follows from a new plan of it.
    """
    try:
        raw = _loaded(content)
        version = raw["format_version"] if raw["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is not a bundle's manifest ({type(error).__name__}); build the bundle again"
        ) from error
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"{file} is a manifest of format {shown(version)}, this version reads {FORMAT_VERSION}; build it "
            "again with this version"
        )
    digest = raw.pop("manifest_sha256", None)
    if canonical_hash(raw) != digest:
        raise UserError(
            f"{file} was changed after it was written (its own digest differs); build the bundle again or copy it again"
        )
    try:
        return _checked({n: v for n, v in raw.items() if n not in ("format", "format_version")}, digest)
    except (Wrong, UserError, RecursionError) as wrong:
        raise UserError(f"{file} was not written by a build: {wrong}; build the bundle again") from wrong


def _checked(raw: dict[str, Any], digest: str) -> Manifest:
    if "spec" not in raw:
        raise Wrong("spec is missing")
    spec = spec_from_json(raw.pop("spec"))
    spec.check()
    stored = read(_Stored, raw)
    files = stored.files
    plan = make_plan(spec)
    if stored.graphs != graph_digests(plan):
        raise Wrong("its graphs are not those that this version plans for its spec")
    if (stored.compiler.neff == "none") != (stored.compiler.toolchain == "cpu"):
        raise Wrong(f"neff is {stored.compiler.neff} and the toolchain {stored.compiler.toolchain}")
    _check_names(files)
    needed = {*stored.graphs, *(_FILES if stored.compiler.neff == "model.pt" else ())}
    shards = {shard_file(rank) for rank in range(MAX_TP)} & files.keys()
    if shards:
        needed |= {shard_file(rank) for rank in range(spec.tp)}
    if missing := sorted(needed - files.keys()):
        raise Wrong(f"files lacks {missing[0]}")
    strange = {n for n in files if n not in _FILES and n.partition("/")[0] not in FOLDERS}
    if odd := sorted((shards | strange | {n for n in files if n.startswith("hlo/")}) - needed):
        raise Wrong(f"files has {odd[0]}, which no build of its spec writes")
    return Manifest(spec, plan, files, stored.compiler, stored.versions, stored.commit, digest)


def _check_names(files: dict[str, File]) -> None:
    """Raise Wrong for the name of a file that could leave the folder, or mean a different file there."""
    folders = {parent for name in files for parent in _parents(name)}
    for name in files:
        plain = _FILE_NAME(name) and not name.endswith((".part", ".tmp"))
        if not plain or name.casefold() == MANIFEST or name in folders:
            raise Wrong(f"it names {shown(name)}, no file of a bundle; do not trust it")
    if len({name.casefold() for name in files}) < len(files):
        raise Wrong("it names two files that differ in case alone; do not trust it")


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _loaded(content: bytes) -> Any:
    if len(content) > MANIFEST_BYTES:
        raise ValueError("too long")
    return json.loads(content.decode("utf-8"))


def graph_digests(plan: BundlePlan) -> dict[str, str]:
    """The file of each graph -> the digest of everything that is planned for it."""
    lists: dict[int, str] = {}

    def digest(tensors: tuple[TensorSpec, ...]) -> str:
        # most graphs share their weights: thousands of rows, hashed once
        if id(tensors) not in lists:
            lists[id(tensors)] = canonical_hash([[t.name, t.shape, t.dtype] for t in tensors])
        return lists[id(tensors)]

    def of(graph: GraphSpec) -> str:
        tensors = (graph.weights, graph.inputs, graph.state, graph.outputs)
        return canonical_hash([list(graph.key), *map(digest, tensors), graph.collectives])

    return {graph.file: of(graph) for graph in plan.graphs}


def sha256_of(path: Path, told: Callable[[int], None] = lambda count: None) -> str:
    """The sha256 of a file, read in pieces; `told` is called with each piece's bytes."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            told(count)
    return digest.hexdigest()


def canonical_hash(value: Any) -> str:
    """The sha256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
