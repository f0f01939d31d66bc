"""The bundle on disk: what manifest.json says, and whether the files are what it says.

safetensors and JSON only: nothing in a bundle is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import Qwen3Config
from model.dtypes import BY_NAME
from model.errors import UserError

FORMAT = "trnspec-bundle"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

PREFILL = "context_encoding_model"
FUSED = "fused_speculation_model"
DECODE = "token_generation_model"
# ends the tag of a step's graph for rows of which none filters
UNFILTERED = "_unfiltered"


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one graph parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return BY_NAME[self.dtype].bytes * math.prod(self.shape)


@dataclass(frozen=True)
class GraphSpec:
    """One compiled graph: parameters in order are weights, inputs, state; state is aliased to outputs."""

    tag: str
    bucket: int
    k: int
    weights: tuple[TensorSpec, ...]
    inputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    collectives: dict[str, int]

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies, and the most ids that a step emits."""
        return self.k + 1

    @property
    def drafts(self) -> bool:
        """Whether the draft's weights and caches are among the parameters."""
        return self.k > 0

    @property
    def file(self) -> str:
        return f"hlo/{self.tag}_bk{self.bucket}.hlo.pb"


@dataclass(frozen=True)
class Bundle:
    """A bundle folder whose manifest has been read and understood."""

    path: Path
    manifest: dict[str, Any]
    graphs: tuple[GraphSpec, ...]

    def __getitem__(self, key: str) -> Any:
        return self.manifest[key]

    def graph(self, tag: str, bucket: int) -> GraphSpec:
        return next(g for g in self.graphs if (g.tag, g.bucket) == (tag, bucket))

    def config(self, role: str) -> Qwen3Config:
        raw = dict(self.manifest["models"][role]["config"])
        raw["eos_token_ids"] = tuple(raw["eos_token_ids"])
        return Qwen3Config(**raw)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle's manifest; UserError says why the folder is not a bundle of this version."""
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{path} has no {MANIFEST}: it is not a bundle, or its build did not finish; "
            "run compile.build with the same --out to finish it"
        )
    return parse_manifest(file.read_bytes(), str(file), path)


def parse_manifest(content: bytes, file: str, path: Path) -> Bundle:
    """The bundle that a manifest's bytes describe; UserError, naming the file, if they describe none."""
    try:
        manifest = json.loads(content.decode("utf-8"))
        version = manifest["format_version"] if manifest["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not a bundle's manifest ({type(error).__name__}); build the bundle again"
        ) from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} is a bundle of format {version}, this version reads {FORMAT_VERSION}; "
            "build it again with this version"
        )
    try:
        graphs = tuple(_graph(g) for g in manifest["graphs"])
        _check_shape(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} lacks or garbles {error}; build the bundle again") from error
    return Bundle(path, manifest, graphs)


def _graph(raw: dict[str, Any]) -> GraphSpec:
    def tensors(key: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, tuple(s), d) for n, s, d in raw[key])

    return GraphSpec(
        raw["tag"],
        raw["bucket"],
        raw["k"],
        tensors("weights"),
        tensors("inputs"),
        tensors("state"),
        tensors("outputs"),
        dict(raw["collectives"]),
    )


def _check_shape(manifest: dict[str, Any]) -> None:
    for key in ("spec", "models", "k", "rows", "tp", "batch", "max_len", "buckets", "dtype", "files", "neff"):
        if key not in manifest:
            raise KeyError(key)


def graph_as_json(graph: GraphSpec) -> dict[str, Any]:
    """A GraphSpec as the manifest holds it."""

    def rows(tensors: tuple[TensorSpec, ...]) -> list[Any]:
        return [[t.name, list(t.shape), t.dtype] for t in tensors]

    return {
        "tag": graph.tag,
        "bucket": graph.bucket,
        "k": graph.k,
        "file": graph.file,
        "weights": rows(graph.weights),
        "inputs": rows(graph.inputs),
        "state": rows(graph.state),
        "outputs": rows(graph.outputs),
        "collectives": graph.collectives,
    }


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def damage(bundle: Bundle) -> list[str]:
    """One sentence for each file that is missing, of another size or another content."""
    found = []
    for name, entry in sorted(bundle["files"].items()):
        file = bundle.path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != entry["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}")
        elif sha256_of(file) != entry["sha256"]:
            found.append(f"{name} has another content than the manifest says (sha256 differs)")
    if manifest_digest(bundle.manifest) != bundle.manifest.get("manifest_sha256"):
        found.append(f"{MANIFEST} was changed after it was written (its own digest differs)")
    return found


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The sha256 of the canonical JSON of a manifest without its own digest."""
    return canonical_hash({k: v for k, v in manifest.items() if k != "manifest_sha256"})


def canonical_hash(value: Any) -> str:
    """The sha256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
