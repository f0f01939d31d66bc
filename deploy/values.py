"""The values file as frozen dataclasses, checked whole before anything is rendered from it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml

from compile.neuron.flags import LNC
from model.errors import UserError

CLAIM_APIS = ("v1", "v1beta1")
# connected sets that the Neuron DRA driver offers: resource.aws.com/devicegroup<n>_id
CONNECTED_DEVICES = (1, 4, 8, 16)
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*")
_PLACEHOLDER = re.compile(r"your[-_ ]|changeme|example\.com|<[^>]*>|\$\{|todo|xxx|my-bucket", re.IGNORECASE)


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
    draft: str
    target_folder: str
    draft_folder: str
    k: int
    tp: int
    batch: int
    max_len: int
    dtype: str


@dataclass(frozen=True)
class Device:
    instance_type: str
    physical_cores_per_device: int
    lnc: int


@dataclass(frozen=True)
class Server:
    replicas: int
    port: int
    cpu: int
    memory_gib: int
    shm_gib: int
    disk_gib: int
    startup_seconds: int


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
    compile: Compile
    load_test: LoadTest
    quality: Quality

    @property
    def devices(self) -> int:
        """Neuron devices of one server: tp logical cores of lnc physical cores each."""
        return self.model.tp * self.device.lnc // self.device.physical_cores_per_device

    def bundle_name(self, variant: str) -> str:
        """The bundle's name says what it was built for."""
        m = self.model
        shape = f"tp{m.tp}-b{m.batch}-s{m.max_len}-{m.dtype}"
        target, draft = (name.rsplit("/", 1)[-1].lower() for name in (m.target, m.draft))
        return f"{target}-{shape}" if variant == "baseline" else f"{target}-{draft}-{shape}-k{m.k}"

    def server_name(self, variant: str) -> str:
        return f"{self.name}-{variant}"

    def url(self, variant: str) -> str:
        """The server's address inside the cluster."""
        return f"http://{self.server_name(variant)}.{self.namespace}.svc.cluster.local:{self.server.port}"

    def s3(self, folder: str) -> str:
        return f"s3://{self.storage.bucket}/{self.storage.prefix}/{folder}"


_T = TypeVar("_T")


def load_values(path: Path) -> Values:
    """The values of a YAML file; UserError names the first key that is missing, unknown or wrong."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read as YAML ({type(error).__name__}); start from deploy/values.yaml"
        ) from error
    values = _parse(Values, raw, "")
    check(values)
    return values


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


def check(values: Values) -> None:
    """Raise UserError for the first value that cannot be deployed."""
    for where, value in _leaves(dataclasses.asdict(values), ""):
        if isinstance(value, int) and value < 1:
            raise UserError(f"{where} is {value}; it must be at least 1")
        if isinstance(value, str) and (not value or _PLACEHOLDER.search(value)):
            raise UserError(f"{where} is {value!r}, which looks unfilled; write your own value")
    for where, value in (("name", values.name), ("namespace", values.namespace)):
        if not _DNS_LABEL.fullmatch(value):
            raise UserError(f"{where} is {value!r}; use up to 40 lower-case letters, digits and hyphens")
    if not _BUCKET.fullmatch(values.storage.bucket):
        raise UserError(f"storage.bucket is {values.storage.bucket!r}, no bucket name; give the name alone")
    for where, value in (
        ("storage.prefix", values.storage.prefix),
        ("model.target_folder", values.model.target_folder),
        ("model.draft_folder", values.model.draft_folder),
    ):
        if not _PATH.fullmatch(value) or ".." in value.split("/"):
            raise UserError(f"{where} is {value!r}; give a path without a slash at either end")
    if values.claim_api not in CLAIM_APIS:
        raise UserError(f"claim_api is {values.claim_api!r}; it must be one of {', '.join(CLAIM_APIS)}")
    _check_images(values.images)
    _check_devices(values)
    if values.server.shm_gib >= values.server.memory_gib:
        raise UserError(
            f"server.shm_gib {values.server.shm_gib} takes all of memory_gib {values.server.memory_gib}, "
            "which it counts against; raise memory_gib"
        )
    if values.load_test.max_tokens >= values.model.max_len - values.model.k:
        raise UserError(
            f"load_test.max_tokens {values.load_test.max_tokens} leaves no room for a prompt in "
            f"model.max_len {values.model.max_len} less model.k {values.model.k}; lower it"
        )


def _leaves(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{where}.{k}" if where else k)]
    return [(where, value)]


def _check_images(images: Images) -> None:
    for name, image in dataclasses.asdict(images).items():
        last = image.rsplit("/", 1)[-1]
        if "@sha256:" not in image and (":" not in last or last.endswith(":latest")):
            raise UserError(f"images.{name} is {image!r}, which may change under its name; add a version or a digest")


def _check_devices(values: Values) -> None:
    lnc, per_device = values.device.lnc, values.device.physical_cores_per_device
    if lnc not in (1, 2):
        raise UserError(f"device.lnc is {lnc}; Trainium2 has logical cores of 1 or 2 physical ones")
    if lnc != LNC:
        raise UserError(f"device.lnc is {lnc}; compile.build compiles for {LNC} alone, so set it to {LNC}")
    if values.model.tp * lnc % per_device or values.devices not in CONNECTED_DEVICES:
        raise UserError(
            f"tp {values.model.tp} at lnc {lnc} is {values.model.tp * lnc / per_device:g} devices, and connected sets "
            f"have {', '.join(map(str, CONNECTED_DEVICES))}; change model.tp or device.lnc"
        )
