"""The values of a deployment, read strictly: a value that a cluster would refuse hours later is refused here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from compile.neuron.flags import LNC
from compile.spec import BuildSpec
from model.config import PRESETS
from model.drafters.registry import DRAFTERS
from model.dtypes import BY_FLAG
from model.errors import UserError
from model.strict import Range, Text, Wrong, read, shown
from trnspec.bundle.spec import MAX_K, MAX_TP

DEFAULTS = Path(__file__).with_name("values.yaml")
NONE = "none"
# connected sets that the Neuron DRA driver offers: resource.aws.com/devicegroup<n>_id
CONNECTED_DEVICES = (1, 4, 8, 16)
_CORES_PER_DEVICE = 8
_PLACEHOLDER = re.compile(r"your-|changeme|example\.com", re.IGNORECASE)
_VENDOR_IMAGE = "public.ecr.aws/neuron/"


# Neuron devices, processors and GiB of memory. Source: https://aws.amazon.com/ec2/instance-types/trn2/
INSTANCES = {"trn2.3xlarge": (1, 12, 128), "trn2.48xlarge": (16, 192, 2048), "trn2u.48xlarge": (16, 192, 2048)}


def text(pattern: str, expected: str) -> Any:
    """A string that a pattern fits from end to end."""
    return Annotated[str, Text(pattern, expected)]


def whole(low: int, high: int) -> Any:
    """A whole number in a range."""
    return Annotated[int, Range(low, high)]


def one_of(*choices: str) -> Any:
    """One of a few words."""
    return Literal[choices]


def _name(most: int) -> Any:
    label = rf"(?!kube-|default$)(?=.{{1,{most}}}$)[a-z]([a-z0-9-]*[a-z0-9])?"
    return text(label, f"up to {most} lower-case letters, digits and hyphens, a letter first, not default or kube-*")


_LABEL = text(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?", "a name of up to 63 lower-case letters, digits and hyphens")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FOLDER = text(rf"(?=.{{1,200}}$){_PART}(/{_PART})*", "a path of letters, digits, . _ and - without a slash at an end")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = text(
    r"(?!xn--|sthree-|amzn-s3-demo-|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$)(?!.*(\.\.|-s3alias$|--ol-s3$|\.mrap$|--x-s3$))"
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "the name of an S3 bucket",
)
# https://github.com/distribution/reference; a version or a digest, because latest changes under its name
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = text(
    rf"(?=.{{1,255}}$)[a-zA-Z0-9.-]+(:[0-9]{{1,5}})?(/{_COMPONENT})+"
    r"(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(@sha256:[0-9a-f]{64})?|@sha256:[0-9a-f]{64})",
    "registry/name:version or registry/name@sha256:digest, not latest",
)
_DRAFT = text(rf"(?=.{{1,96}}$){_PART}(/{_PART})?", "the name of a checkpoint, or none")
_LIST = text(r"(?=.{1,200}$)[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*", "names with commas between them")
_LABEL_KEY = text(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", "the key of a label")
_MOST = 1_000_000
# a disk no larger than the instance store of trn2.48xlarge
_CPU, _MEMORY, _DISK = whole(1, 192), whole(1, 2048), whole(1, 7000)
_FIELDS: dict[str, Any] = {
    # a Job's name adds up to 29 characters, and a pod's name is a label of at most 63
    "name": _name(30),
    "namespace": _name(40),
    "region": text(r"[a-z]{2}(-[a-z]+)+-[1-9]", "a region such as us-west-2"),
    "kubernetes": text(r"1\.(3[4-9]|[4-9][0-9])", "a version from 1.34 on, without a patch level"),
    "instance_type": one_of(*INSTANCES),
    "public_key": text(r"none|RW[A-Za-z0-9+/]{54}", "minisign's line of base64, 56 characters from RW on, or none"),
    "storage": {"bucket": _BUCKET, "prefix": _FOLDER, "uid": whole(1, 2**31 - 1), "gid": whole(1, 2**31 - 1)},
    "images": {"server": _IMAGE, "tools": _IMAGE, "lm_eval": _IMAGE},
    "model": {
        "target": one_of(*PRESETS), "drafter": one_of(*(kind for kind in DRAFTERS if kind != NONE)), "draft": _DRAFT,
        "target_folder": _FOLDER, "draft_folder": _FOLDER, "k": whole(1, MAX_K), "tp": whole(1, MAX_TP),
        "batch": whole(1, 4096), "max_len": whole(1, 1 << 24), "dtype": one_of(*BY_FLAG),
    },
    "server": {
        "engine": one_of("nxdi", "trnspec"), "replicas": whole(1, 1000), "port": whole(1024, 65535),
        "api_key_secret": _LABEL, "clients_namespace": _LABEL, "prometheus_namespace": _LABEL, "cpu": _CPU,
        "memory_gib": _MEMORY, "shm_gib": _MEMORY, "disk_gib": _DISK, "startup_seconds": whole(60, 86400),
    },
    "router": {
        "kind": one_of(NONE, "gateway"), "gateway": _LABEL, "gateway_namespace": _LABEL, "picker": _LABEL,
        "picker_label": _LABEL_KEY,
    },
    "compile": {"cpu": _CPU, "memory_gib": _MEMORY, "disk_gib": _DISK, "deadline_seconds": whole(600, 7 * 86400)},
    "load_test": {
        "prompts": _FOLDER, "requests": whole(1, _MOST), "concurrency": whole(1, _MOST), "max_tokens": whole(1, _MOST),
    },
    "quality": {"tasks": _LIST, "max_gen_toks": whole(1, _MOST)},
}  # fmt: skip


def _declared(name: str, fields: Mapping[str, Any]) -> type[Any]:
    """A dataclass with these fields, for the strict reader."""
    named = [(n, _declared(n, kind) if isinstance(kind, dict) else kind) for n, kind in fields.items()]
    return make_dataclass(name, named, frozen=True)


_VALUES = _declared("Values", _FIELDS)


def _unfilled(value: Any, at: str = "") -> Iterator[str]:
    """A clause for each text that is still a placeholder."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _unfilled(inner, f"{at}{name}.")
        elif isinstance(inner, str) and _PLACEHOLDER.search(inner):
            yield f"{at}{name} is {shown(inner)}, which looks unfilled, expected your own value"


class Values(dict[str, Any]):
    """Checked values, as the YAML file holds them."""

    @property
    def devices(self) -> int:
        """Neuron devices of one server: tp logical cores of LNC physical cores each."""
        tp: int = self["model"]["tp"]
        return tp * LNC // _CORES_PER_DEVICE

    @property
    def version(self) -> str:
        """A digest of what the bundles depend on: models, folders, shape, cores, and the image that compiles."""
        makers = [self["model"], LNC, self["images"]["tools"]]
        return hashlib.sha256(json.dumps(makers, sort_keys=True).encode()).hexdigest()[:8]

    def bundle(self, variant: str) -> str:
        """The bundle's name: models, shape and version, so that changed values never meet an older bundle."""
        m = self["model"]
        drafts = m["draft"] if DRAFTERS[m["drafter"]].has_model else m["drafter"]
        target, draft = (name.rsplit("/", 1)[-1].lower() for name in (m["target"], drafts))
        shape = f"tp{m['tp']}-b{m['batch']}-s{m['max_len']}-{m['dtype']}"
        pair = f"{target}-{draft}-{shape}-k{m['k']}" if variant == "speculative" else f"{target}-{shape}"
        return f"{pair}-{self.version}"


def load_values(path: Path = DEFAULTS, changes: Sequence[str] = ()) -> Values:
    """The values of a YAML file with changes of the form key.key=value.

    UserError names the first key that is missing, unknown, doubled or wrong.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Strict)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else type(error).__name__
        raise UserError(f"{path} cannot be read as YAML ({reason}); start from deploy/values.yaml") from error
    for change in changes:
        _set(raw, change)
    return check(raw)


def check(raw: Any) -> Values:
    """Raise UserError for the first value that cannot be deployed."""
    try:
        read(_VALUES, raw)
        if clause := next(_unfilled(raw), ""):
            raise Wrong(clause)
    except Wrong as wrong:
        raise UserError(f"the values cannot be deployed: {wrong}; see deploy/values.yaml") from None
    values = Values(raw)
    for faults in (_size_faults, _model_faults, _engine_faults):
        if sentence := next(faults(values), ""):
            raise UserError(sentence)
    return values


class _Strict(yaml.SafeLoader):
    """YAML without doubled keys, of which the last would win silently, and with decimal numbers only."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise yaml.constructor.ConstructorError(problem=f"{key} is given twice")
    return loader.construct_mapping(node, deep=True)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return int(node.value) if re.fullmatch(r"0|[1-9][0-9]{0,18}", node.value) else node.value


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Strict.add_constructor("tag:yaml.org,2002:int", _number)


def _set(raw: Any, change: str) -> None:
    """Replace one value that the file has; the text is a number where the file has one."""
    name, equals, word = change.partition("=")
    *outer, last = name.split(".")
    for key in outer:
        raw = raw.get(key) if isinstance(raw, dict) else None
    if not equals or not isinstance(raw, dict) or isinstance(raw.get(last, {}), dict):
        raise UserError(f"--set {change!r} names no value; write key.key=value with a key of the values file")
    raw[last] = int(word) if isinstance(raw[last], int) and re.fullmatch(r"0|[1-9][0-9]{0,18}", word) else word


def _size_faults(values: Values) -> Iterator[str]:
    """A sentence for each size that does not fit: devices, processors, memory, lengths."""
    m, server, instance = values["model"], values["server"], values["instance_type"]
    devices, cpus, memory = INSTANCES[instance]
    if m["tp"] * LNC % _CORES_PER_DEVICE or values.devices not in CONNECTED_DEVICES:
        sets = ", ".join(map(str, CONNECTED_DEVICES))
        taken = m["tp"] * LNC / _CORES_PER_DEVICE
        yield f"model.tp {m['tp']} takes {taken:g} devices, and connected sets have {sets}; change it"
    if values.devices > devices:
        yield f"model.tp {m['tp']} needs {values.devices} devices and a {instance} has {devices}; lower it"
    for part in ("server", "compile"):
        for key, most in (("cpu", cpus), ("memory_gib", memory)):
            if values[part][key] > most:
                yield f"{part}.{key} is {values[part][key]} and a {instance} has {most}; lower it"
    if server["shm_gib"] >= server["memory_gib"]:
        yield "server.shm_gib is part of server.memory_gib and must be less; lower it"
    for part, key in (("load_test", "max_tokens"), ("quality", "max_gen_toks")):
        if values[part][key] >= m["max_len"] - m["k"]:
            yield f"{part}.{key} {values[part][key]} leaves a prompt no room in model.max_len less model.k; lower it"


def _model_faults(values: Values) -> Iterator[str]:
    """A sentence for each fault that compile.build would refuse hours later."""
    m = values["model"]
    kind, draft, chain = DRAFTERS[m["drafter"]], {m["draft"], m["draft_folder"]}, m["drafter"] == "chain"
    if kind.has_model and NONE in draft:
        yield f"the drafter {m['drafter']} needs a model; name it as model.draft and model.draft_folder"
    if not kind.has_model and draft != {NONE}:
        yield f"the drafter {m['drafter']} has no model; write none for model.draft and model.draft_folder"
    if m["draft_folder"] == m["target_folder"]:
        yield "model.draft_folder is the target's; name the draft's own folder"
    if chain and m["draft"] not in PRESETS:
        yield f"model.draft is {m['draft']}, and the draft of a chain must be one of {', '.join(PRESETS)}; name one"
    if kind.max_k and m["k"] > kind.max_k:
        yield f"model.k is {m['k']} and the drafter {m['drafter']} drafts at most {kind.max_k} in a step; lower it"
    # but for a chain only the draft's folder has its shape
    drafter = {"draft": m["draft"]} if chain else {"drafter": "ngram"}
    try:
        sizes = {name: m[name] for name in ("target", "tp", "batch", "max_len", "dtype")}
        BuildSpec(k=str(m["k"]), **sizes, **drafter).check()
    except UserError as error:
        yield f"model cannot be built: {error}"


def _engine_faults(values: Values) -> Iterator[str]:
    """A sentence for each value that the chosen engine cannot serve."""
    nxdi, drafter = values["server"]["engine"] == "nxdi", values["model"]["drafter"]
    if nxdi and drafter != "chain":
        yield f"server.engine nxdi cannot load the drafter {drafter}; set server.engine to trnspec"
    if not nxdi and values["images"]["server"].startswith(_VENDOR_IMAGE):
        yield "images.server is the vendor's and lacks our plugin; name an image of deploy/Dockerfile's target server"
    if nxdi and values["router"]["kind"] == "gateway":
        yield "server.engine nxdi stays ready while it ends and lacks a picker's metrics; set server.engine to trnspec"
