"""The bundle on disk: what manifest.json says.

safetensors and JSON only: nothing in a bundle is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from model.bundle.agreement import check_agreement
from model.bundle.schema import MANIFEST_BYTES, TAGS, Wrong, check_names, check_types, shown
from model.config import Qwen3Config
from model.draft_config import DraftConfig, draft_config
from model.drafting import Drafting, recorded
from model.dtypes import BY_NAME
from model.errors import UserError

FORMAT = "trnspec-bundle"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_PIECE = 1 << 20
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
PREFILL, FUSED, DECODE = TAGS[:3]


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

    @property
    def drafting(self) -> Drafting:
        """The drafter."""
        return recorded(self.manifest)

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k that a step may have, rising, 0 among them: the target's own graph is in every bundle."""
        return tuple(self.manifest.get("ks", sorted({0, self["k"]})))

    @property
    def separate(self) -> bool:
        """Whether steps have graphs that draft and verify one after the other."""
        return bool(self["spec"].get("separate", False))

    @property
    def mask_axes(self) -> int:
        """Axes of the masks of a step with drafts: 2 are one of a sequence, 3 one of each row, 0 is no mask."""
        return max((len(t.shape) for g in self.graphs for t in g.inputs if t.name == "allowed"), default=0)

    def graph(self, tag: str, bucket: int) -> GraphSpec:
        return next(g for g in self.graphs if (g.tag, g.bucket) == (tag, bucket))

    def title(self, role: str) -> str:
        """A model for people: its name, and its size where that is a folder's, which may be any word."""
        name: str = self.manifest["models"][role]["name"]
        if "config" not in self.manifest["models"][role] or "/" in name:
            return name
        count = self.config(role).parameter_count
        size = next((f"{count / unit:.1f}{sign}" for unit, sign in _UNITS if count >= unit), str(count))
        return f"{name} ({size})"

    @overload
    def config(self, role: Literal["target"]) -> Qwen3Config: ...

    @overload
    def config(self, role: str) -> DraftConfig: ...

    def config(self, role: str) -> DraftConfig:
        """The configuration of the target or the draft."""
        kind = "" if role == "target" else self.drafting.kind
        return draft_config(kind, self.manifest["models"][role]["config"])


def read_bundle(path: Path) -> Bundle:
    """Read a bundle's manifest; UserError says why the folder is not a bundle of this version.

    The files are not looked at: who loads them calls open_bundle.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{path} has no {MANIFEST}: it is not a bundle, or its build did not finish; "
            "run compile.build with the same --out to finish it"
        )
    with file.open("rb") as opened:
        return parse_manifest(opened.read(MANIFEST_BYTES + 1), str(file), path)


def parse_manifest(content: bytes, file: str, path: Path) -> Bundle:
    """The bundle that a manifest's bytes describe; UserError, naming the file, if they describe none.

    A manifest is anybody's: its own digest, every type and range, and the agreement of its fields are checked here.
    """
    try:
        manifest = _loaded(content)
        version = manifest["format_version"] if manifest["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is not a bundle's manifest ({type(error).__name__}); build the bundle again"
        ) from error
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"{file} is a bundle's of format {shown(version)}, this version reads {FORMAT_VERSION}; "
            "build it again with this version"
        )
    if manifest_digest(manifest) != manifest.get("manifest_sha256"):
        raise UserError(
            f"{file} was changed after it was written (its own digest differs); build the bundle again or copy it again"
        )
    try:
        check_types(manifest)
        check_names(manifest["files"], file, MANIFEST)
        check_agreement(manifest, canonical_hash([manifest["spec"], manifest["models"]]))
    except Wrong as wrong:
        raise UserError(f"{file} is not what a build writes: {wrong}; build the bundle again") from wrong
    return Bundle(path, manifest, tuple(_graph(g) for g in manifest["graphs"]))


def _loaded(content: bytes) -> Any:
    if len(content) > MANIFEST_BYTES:
        raise ValueError("too long")
    return json.loads(content.decode("utf-8"))


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


def sha256_of(path: Path, told: Callable[[int], None] = lambda count: None) -> str:
    """The sha256 of a file, read in pieces; `told` of each piece's bytes."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            told(count)
    return digest.hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The sha256 of the canonical JSON of a manifest without its own digest."""
    return canonical_hash({k: v for k, v in manifest.items() if k != "manifest_sha256"})


def canonical_hash(value: Any) -> str:
    """The sha256 of a value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
