"""What the values of a deployment may be: each refused where it is read, not on a cluster hours later."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from bench.serving.prompts import prompt_sets
from compile.neuron.flags import LNC
from compile.spec import BuildSpec
from model.config import PRESETS
from model.drafting import KINDS
from model.errors import UserError

if TYPE_CHECKING:
    from deploy.values import Values

ENGINES = ("nxdi", "trnspec")
DRAFTERS = tuple(name for name in KINDS if name != "none")
# what stands for the draft and its folder where the drafter has no model
NO_DRAFT = "none"
ROUTERS = ("none", "gateway")
# of the image that has NxDI and no plugin of ours
_VENDOR_IMAGE = "public.ecr.aws/neuron/"
CLAIM_APIS = ("v1", "v1beta1")
# connected sets that the Neuron DRA driver offers: resource.aws.com/devicegroup<n>_id
CONNECTED_DEVICES = (1, 4, 8, 16)
# Neuron devices of each Trainium2 instance type, with eight physical cores each
INSTANCES = {"trn2.3xlarge": 1, "trn2.48xlarge": 16, "trn2u.48xlarge": 16}
_CORES_PER_DEVICE = 8
# the shortest start that a bundle of this size can be copied and loaded in
_SHORTEST_START_SECONDS = 60
_PLACEHOLDER = re.compile(r"your[-_ ]|changeme|example\.com|<[^>]*>|\$\{|todo|xxx|my-bucket", re.IGNORECASE)
# what an image's name is made of: https://github.com/distribution/reference
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::[0-9]{{1,5}})?/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?P<tag>:[\w][\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)
_DNS_LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"
_MODEL = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?"
_FOLDER = r"(?!.*(^|/)\.{1,2}(/|$))[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*"
# key of the values | what its whole text must match | in words
_TEXTS = (
    # a Job's name adds up to 29 characters, and a pod's name is a label of at most 63
    ("name", r"(?=.{1,30}$)" + _DNS_LABEL, "up to 30 lower-case letters, digits and hyphens, a letter first"),
    ("namespace", r"(?=.{1,40}$)" + _DNS_LABEL, "up to 40 lower-case letters, digits and hyphens, a letter first"),
    ("region", r"[a-z]{2}(-[a-z]+)+-\d", "a region such as us-west-2"),
    ("partition", r"aws|aws-cn|aws-us-gov", "aws, aws-cn or aws-us-gov"),
    ("kubernetes", r"1\.\d{1,3}(\.\d{1,3})?", "a version such as 1.34"),
    ("claim_api", "|".join(CLAIM_APIS), " or ".join(CLAIM_APIS)),
    ("storage.bucket", r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the bucket's name alone"),
    ("storage.prefix", _FOLDER, "a path without a slash at either end, of letters, digits, . _ and -"),
    ("model.target_folder", _FOLDER, "a path without a slash at either end, of letters, digits, . _ and -"),
    ("model.draft_folder", _FOLDER, "a path without a slash at either end, of letters, digits, . _ and -"),
    ("model.target", "|".join(map(re.escape, PRESETS)), f"one of {', '.join(PRESETS)}"),
    ("model.drafter", "|".join(DRAFTERS), f"one of {', '.join(DRAFTERS)}"),
    ("device.instance_type", "|".join(map(re.escape, INSTANCES)), f"one of {', '.join(INSTANCES)}"),
    ("server.engine", "|".join(ENGINES), " or ".join(ENGINES)),
    ("router.kind", "|".join(ROUTERS), " or ".join(ROUTERS)),
    ("router.gateway", r"(?=.{1,63}$)" + _DNS_LABEL, "the name of a Gateway"),
    ("router.gateway_namespace", r"(?=.{1,63}$)" + _DNS_LABEL, "the name of a namespace"),
    ("router.picker", r"(?=.{1,63}$)" + _DNS_LABEL, "the name of a Service"),
    ("router.picker_label", r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", "a label's key"),
    ("server.api_key_secret", r"(?=.{1,63}$)" + _DNS_LABEL, "the name of a Secret"),
    ("server.clients_namespace", r"(?=.{1,63}$)" + _DNS_LABEL, "the name of a namespace"),
    ("load_test.cloudwatch_namespace", r"(?!AWS/)[A-Za-z0-9._/#:-]{1,255}", "letters, digits, . _ / # : -, not AWS/"),
    ("quality.tasks", r"[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*", "names of lm-eval's tasks, with commas between them"),
)
# key of the values | least | most
_NUMBERS = (
    ("storage.uid", 1, 2**31 - 1),
    ("storage.gid", 1, 2**31 - 1),
    ("server.port", 1024, 65535),
    ("server.replicas", 1, 1000),
    ("server.startup_seconds", _SHORTEST_START_SECONDS, 86400),
    ("compile.deadline_seconds", 600, 7 * 86400),
    ("device.physical_cores_per_device", _CORES_PER_DEVICE, _CORES_PER_DEVICE),
)


def check(values: Values) -> None:
    """Raise UserError for the first value that cannot be deployed."""
    leaves = dict(_leaves(dataclasses.asdict(values), ""))
    for where, value in leaves.items():
        if isinstance(value, int) and value < 1:
            raise UserError(f"{where} is {value}; it must be at least 1")
        if isinstance(value, str) and (not value or _PLACEHOLDER.search(value)):
            raise UserError(f"{where} is {value!r}, which looks unfilled; write your own value")
    for where, pattern, expected in _TEXTS:
        if not re.fullmatch(pattern, leaves[where]):
            raise UserError(f"{where} is {leaves[where]!r}; it must be {expected}")
    for where, least, most in _NUMBERS:
        if not least <= leaves[where] <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise UserError(f"{where} is {leaves[where]}; it must be {wanted}")
    judges = (_check_images, _check_devices, _check_draft, _check_build, _check_servers, _check_engine, _check_load)
    for judge in judges:
        judge(values)


def _leaves(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{where}.{k}" if where else k)]
    return [(where, value)]


def _check_images(values: Values) -> None:
    for name, image in dataclasses.asdict(values.images).items():
        parts = _IMAGE.fullmatch(image)
        if not parts:
            raise UserError(f"images.{name} is {image!r}, no image's name; write registry/name:version")
        if not parts["digest"] and parts["tag"] in (None, ":latest"):
            raise UserError(f"images.{name} is {image!r}, which may change under its name; add a version or a digest")
        if "/" not in image:
            raise UserError(f"images.{name} is {image!r}, which names no registry; write registry/name:version")


def _check_devices(values: Values) -> None:
    lnc, tp, per_instance = values.device.lnc, values.model.tp, INSTANCES[values.device.instance_type]
    if lnc not in (1, 2):
        raise UserError(f"device.lnc is {lnc}; Trainium2 has logical cores of 1 or 2 physical ones")
    if lnc != LNC:
        raise UserError(f"device.lnc is {lnc}; compile.build compiles for {LNC} alone, so set it to {LNC}")
    if tp * lnc % _CORES_PER_DEVICE or values.devices not in CONNECTED_DEVICES:
        raise UserError(
            f"tp {tp} at lnc {lnc} is {tp * lnc / _CORES_PER_DEVICE:g} devices, and connected sets "
            f"have {', '.join(map(str, CONNECTED_DEVICES))}; change model.tp or device.lnc"
        )
    if values.devices > per_instance:
        raise UserError(
            f"tp {tp} needs {values.devices} devices and a {values.device.instance_type} has {per_instance}; "
            "lower model.tp or choose a larger instance"
        )


def _check_draft(values: Values) -> None:
    """Whether the draft's name is one that the drafter can have."""
    m = values.model
    if not m.has_draft and (m.draft, m.draft_folder) != (NO_DRAFT, NO_DRAFT):
        raise UserError(
            f"model.drafter is {m.drafter}, which has no model, and model.draft is {m.draft!r}; write {NO_DRAFT} there "
            "and as model.draft_folder"
        )
    if m.drafter == "chain" and m.draft not in PRESETS:
        raise UserError(f"model.draft is {m.draft!r}; it must be one of {', '.join(PRESETS)}")
    if m.has_draft and (m.draft == NO_DRAFT or not re.fullmatch(_MODEL, m.draft)):
        raise UserError(f"model.draft is {m.draft!r}; it must be the name of a checkpoint that drafts by {m.drafter}")


def _check_build(values: Values) -> None:
    """What compile.build would refuse, hours earlier; but for a chain the draft's shape is in its folder alone."""
    m, limit = values.model, KINDS[values.model.drafter].limit
    target = BuildSpec(m.target, tp=m.tp, k=m.k, batch=m.batch, max_len=m.max_len, dtype=m.dtype)
    draft = {"draft": m.draft} if m.drafter == "chain" else {"drafter": "ngram"}
    try:
        dataclasses.replace(target, **draft).check()  # type: ignore[arg-type]
        if limit and m.k > limit:
            raise UserError(f"k is {m.k}; the drafter {m.drafter} drafts at most {limit} in a step, lower k")
    except UserError as error:
        raise UserError(f"model cannot be built: {error}") from error


def _check_servers(values: Values) -> None:
    if values.server.shm_gib >= values.server.memory_gib:
        raise UserError(
            f"server.shm_gib {values.server.shm_gib} takes all of memory_gib {values.server.memory_gib}, "
            "which it counts against; raise memory_gib"
        )


def _check_engine(values: Values) -> None:
    engine, image = values.server.engine, values.images.server
    if engine == "nxdi" and values.model.drafter != "chain":
        raise UserError(
            f"server.engine is nxdi and model.drafter is {values.model.drafter}, which NxDI's loader cannot load; set "
            "server.engine to trnspec, or model.drafter to chain"
        )
    if engine == "trnspec" and image.startswith(_VENDOR_IMAGE):
        raise UserError(
            f"server.engine is trnspec and images.server is {image!r}, which lacks our plugin; name an image that was "
            "built from deploy/Dockerfile's target server"
        )
    if values.router.kind == "gateway" and engine != "trnspec":
        raise UserError(
            f"router.kind is gateway and server.engine is {engine}, which stays ready while it ends and has not the "
            "metrics that an endpoint picker reads; set server.engine to trnspec"
        )


def _check_load(values: Values) -> None:
    if values.load_test.max_tokens >= values.model.max_len - values.model.k:
        raise UserError(
            f"load_test.max_tokens {values.load_test.max_tokens} leaves no room for a prompt in "
            f"model.max_len {values.model.max_len} less model.k {values.model.k}; lower it"
        )
    prompt_sets(values.load_test.prompt_set, seed=0)
