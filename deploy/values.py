"""The values file as frozen dataclasses, read strictly; `deploy.checks` says what they may be."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml

from deploy.checks import check
from model.drafting import KINDS
from model.errors import UserError


@dataclass(frozen=True)
class Storage:
    bucket: str
    prefix: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Images:
    """Image names with a version or a digest."""

    server: str
    tools: str
    lm_eval: str


@dataclass(frozen=True)
class ModelPair:
    """The pair and the shape it is built for; k counts draft tokens per step."""

    target: str
    drafter: str
    draft: str
    target_folder: str
    draft_folder: str
    k: int
    tp: int
    batch: int
    max_len: int
    dtype: str

    @property
    def has_draft(self) -> bool:
        """Whether the drafter has a model."""
        return KINDS[self.drafter].has_model

    @property
    def draft_title(self) -> str:
        """What drafts, in words."""
        return self.draft if self.has_draft else self.drafter


@dataclass(frozen=True)
class Device:
    instance_type: str
    physical_cores_per_device: int
    lnc: int


@dataclass(frozen=True)
class Server:
    engine: str
    replicas: int
    port: int
    api_key_secret: str
    clients_namespace: str
    cpu: int
    memory_gib: int
    shm_gib: int
    disk_gib: int
    startup_seconds: int


@dataclass(frozen=True)
class Router:
    """What is before the servers; names of what the cluster has already."""

    kind: str
    gateway: str
    gateway_namespace: str
    picker: str
    picker_label: str


@dataclass(frozen=True)
class Compile:
    cpu: int
    memory_gib: int
    disk_gib: int
    deadline_seconds: int


@dataclass(frozen=True)
class LoadTest:
    prompt_set: str
    requests: int
    concurrency: int
    max_tokens: int
    cloudwatch_namespace: str


@dataclass(frozen=True)
class Quality:
    tasks: str
    max_gen_toks: int


@dataclass(frozen=True)
class Values:
    """A deployment; every manifest is a function of it."""

    name: str
    namespace: str
    region: str
    partition: str
    kubernetes: str
    claim_api: str
    storage: Storage
    images: Images
    model: ModelPair
    device: Device
    server: Server
    router: Router
    compile: Compile
    load_test: LoadTest
    quality: Quality

    @property
    def devices(self) -> int:
        """Neuron devices of one server: tp logical cores of lnc physical cores each."""
        return self.model.tp * self.device.lnc // self.device.physical_cores_per_device

    @property
    def version(self) -> str:
        """A digest of what makes the bundles: models, folders, shape, cores, and the image that compiles."""
        makers = [*dataclasses.astuple(self.model), self.device.lnc, self.images.tools]
        return hashlib.sha256(json.dumps(makers).encode()).hexdigest()[:8]

    def bundle_name(self, variant: str) -> str:
        """The bundle's name says what it was built for and by what, so that an upgrade meets no older bundle."""
        m = self.model
        shape = f"tp{m.tp}-b{m.batch}-s{m.max_len}-{m.dtype}"
        target, draft = (name.rsplit("/", 1)[-1].lower() for name in (m.target, m.draft_title))
        named = f"{target}-{shape}" if variant == "baseline" else f"{target}-{draft}-{shape}-k{m.k}"
        return f"{named}-{self.version}"

    def server_name(self, variant: str) -> str:
        return f"{self.name}-{variant}"

    def url(self, variant: str) -> str:
        """The server's address inside the cluster."""
        return f"http://{self.server_name(variant)}.{self.namespace}.svc.cluster.local:{self.server.port}"

    def s3(self, folder: str) -> str:
        return f"s3://{self.storage.bucket}/{self.storage.prefix}/{folder}"


_T = TypeVar("_T")


def load_values(path: Path, changes: Sequence[str] = ()) -> Values:
    """The values of a YAML file with changes of the form key.key=value.

    UserError names the first key that is missing, unknown, doubled or wrong.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Strict)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = error.problem if isinstance(error, yaml.constructor.ConstructorError) else type(error).__name__
        raise UserError(f"{path} cannot be read as YAML ({reason}); start from deploy/values.yaml") from error
    for change in changes:
        _set(raw, change)
    values = _parse(Values, raw, "")
    check(values)
    return values


class _Strict(yaml.SafeLoader):
    """YAML in which a key may stand once: the last of two would win unseen."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise yaml.constructor.ConstructorError(problem=f"{key} is given twice")
    return loader.construct_mapping(node, deep=True)


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _set(raw: Any, change: str) -> None:
    """Replace one value that the file has; the text is read as YAML, so numbers are numbers."""
    name, equals, text = change.partition("=")
    *outer, last = name.split(".")
    at = raw
    for key in outer:
        at = at.get(key) if isinstance(at, dict) else None
    if not equals or not isinstance(at, dict) or last not in at:
        raise UserError(f"--set {change!r} names no value; write key.key=value with a key of the values file")
    try:
        at[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {change!r} cannot be read; write key.key=value") from error


def _parse(kind: type[_T], raw: Any, where: str) -> _T:
    hints = get_type_hints(kind)
    if not isinstance(raw, dict):
        raise UserError(f"{where or 'the values file'} is {raw!r}; it must hold {', '.join(hints)}")
    for name in [*raw, *hints]:
        if name not in hints:
            raise UserError(f"{where}{name} is no value; the values are {', '.join(hints)}")
        if name not in raw:
            raise UserError(f"{where}{name} is missing; see deploy/values.yaml")
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        value = raw[name]
        if dataclasses.is_dataclass(hint):
            found[name] = _parse(cast("type[Any]", hint), value, f"{where}{name}.")
        elif type(value) is hint:
            found[name] = value
        else:
            raise UserError(f"{where}{name} is {value!r}; it must be of type {hint.__name__}")
    return kind(**found)
