"""The manifests as kustomize renders them: valid by Kubernetes' schemas, and true of the code, the images and a node.

A law returns sentences about what is wrong; `FAULTS` plants faults for each one in a copy of deploy/.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from botocore import configprovider
from huggingface_hub import constants
from kubernetes_validate import ValidationError, utils

from bench.serving import __main__ as serving
from compile import serve_command, store
from compile.neuron.sdk import JOB_BYTES
from compile.spec import parse
from deploy import publish
from model.errors import UserError
from trnspec.bundle.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FOLDERS = ("cluster", "jobs", "overlays/speculative", "overlays/baseline", "overlays/device-plugin")
KUBECTL = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
COMMANDS = {"compile.build": parse, "compile.store": store.main, "bench.serving": serving.main,
            "deploy.publish": publish.main}  # fmt: skip
# read by libc and pip; test_vllm.py looks up those of vLLM
KNOWN = {"HOME", "PATH", "LD_LIBRARY_PATH", "PIP_NO_CACHE_DIR"}
# trn2.48xlarge. Source: Amazon EC2, instance types, Trn2
VCPUS, MEMORY, DEVICES = 192, 2048 << 30, 16
RESTRICTED = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
              "readOnlyRootFilesystem": True, "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
Objects = dict[tuple[str, str, str], Any]
Law = Callable[[Objects, Path], Iterator[str]]


def render(deploy: Path, folder: str) -> Objects:
    """(folder, kind, name) -> object."""
    command = [KUBECTL or "kubectl", "kustomize", str(deploy / folder)]
    made = yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {(folder, o["kind"], o["metadata"]["name"]): o for o in made}


def pods(objects: Objects) -> Iterator[tuple[str, Any, list[Any]]]:
    """Where a pod is, its specification and its containers, each with all of its words under `words`."""
    for (folder, kind, name), made in objects.items():
        if kind in ("Deployment", "Job"):
            pod = made["spec"]["template"]["spec"]
            parts = [*pod.get("initContainers", []), *pod["containers"]]
            yield f"{folder} {name}", pod, [{"words": [*p["command"], *p.get("args", [])]} | p for p in parts]


def stages(deploy: Path) -> dict[str, str]:
    """The Dockerfile's text by the name of its stage."""
    text = (deploy / "Dockerfile").read_text(encoding="utf-8")
    return {m[1]: m[2] for m in re.finditer(r"^FROM \S+ AS (\w+)$(.*?)(?=^FROM|\Z)", text, re.M | re.S)}


def copied(stage: str) -> set[str]:
    return {word for line in re.findall(r"^COPY (.*) \S+$", stage, re.M) for word in line.split()}


def amount(text: str | int) -> int:
    """The number of a quantity such as 8 or 32Gi."""
    return int(str(text).removesuffix("Gi")) << 30 * str(text).endswith("Gi")


def invalid(objects: Objects, deploy: Path) -> Iterator[str]:
    for (_, kind, name), made in objects.items():
        for version in ("1.34", "1.37"):
            try:
                utils.validate(made, version, strict=True)
            except ValidationError as error:
                yield f"{kind} {name}: {error.message}"


def accept(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Parse names only, since some values are files of an image; exit with 2 at unknown ones, else with 0."""
    for action in parser._actions:
        action.type = None
    raise SystemExit(2 * bool(parser.parse_known_args(words)[1]))


def unknown_flags(objects: Objects, deploy: Path) -> Iterator[str]:
    """Commands that our parsers refuse; `vllm serve` is what serve_command prints, and more."""
    *known, config = serve_command.serve_command("/bundles/$(BUNDLE)", "neuron")
    for where, words in ((where, part["words"]) for where, _, parts in pods(objects) for part in parts):
        halves = [half for word in words for half in word.split("=", 1)]
        right = set(known) <= set(halves) and json.loads(config).items() <= json.loads(halves[-1]).items()
        with pytest.MonkeyPatch.context() as patch, suppress(KeyError):
            patch.setattr(argparse.ArgumentParser, "parse_args", accept)
            try:
                right = right or bool(COMMANDS[words[2]](words[3:]))
            except SystemExit as end:
                right = end.code == 0
        if not right:
            yield f"{where}: {words}"


def unknown_variables(objects: Objects, deploy: Path) -> Iterator[str]:
    """Variables that nothing reads, and references to variables that are not set."""
    files = [f for name in ("trnspec", "compile", "serve", "bench", "deploy") for f in (ROOT / name).rglob("*.py")]
    vendors = inspect.getsource(constants), str(configprovider.BOTOCORE_DEFAUT_SESSION_VARIABLES)
    source = "".join([*map(Path.read_text, files), *vendors])
    shared = set(objects["cluster", "ConfigMap", "specdec"]["data"])
    lines = " ".join(re.findall(r"^ENV (.*)", (deploy / "Dockerfile").read_text(encoding="utf-8"), re.M))
    parts = [part for _, _, parts in pods(objects) for part in parts]
    used = {name for part in parts for name in re.findall(r"\$\((\w+)\)", " ".join(part["words"]))}
    yield from (f"{name} is not set" for name in used - shared)
    names = shared | set(re.findall(r"\b(\w+)=", lines)) | {e["name"] for part in parts for e in part.get("env", [])}
    for name in {name for name in names - used - KNOWN if not name.startswith("VLLM_")}:
        if not re.search(rf"[\"']{name}[\"']", source):
            yield f"nothing reads {name}"


def unknown_images(objects: Objects, deploy: Path) -> Iterator[str]:
    """Images that the Dockerfile does not make, and modules and folders that they do not hold."""
    for where, part in ((where, part) for where, _, parts in pods(objects) for part in parts):
        name = re.match(r"your-registry/specdec-(\w+):\d", part["image"])
        stage = stages(deploy).get(name[1], "") if name else ""
        module = part["words"][2].replace(".", "/") if part["words"][0] == "python" else "serve"
        there = any(f"{module}/".startswith(f"{item.removesuffix('.py')}/") for item in copied(stage))
        if not there or not all(f in stage for f in re.findall(r"=(/opt/\w+)/", " ".join(part["words"]))):
            yield f"{where}: {part['image']} cannot run {part['words']}"


def unsafe(objects: Objects, deploy: Path) -> Iterator[str]:
    """Pods that the Pod Security standard `restricted` refuses, shells, and folders that nothing provides."""
    for where, pod, parts in pods(objects):
        for part in parts:
            context = pod["securityContext"] | part["securityContext"]
            if not RESTRICTED.items() <= context.items() or part["words"][0] not in ("python", "vllm"):
                yield f"{where}: {part['name']} is not confined"
            named = set(re.findall(r"(?:^|[ =])(/\w+)", " ".join(part["words"]))) - {"/opt"}
            if missing := named - {mount["mountPath"] for mount in part["volumeMounts"]}:
                yield f"{where}: {part['name']} mounts no {missing}"


def dangling(objects: Objects, deploy: Path) -> Iterator[str]:
    """Names of objects that are not there, and Services that select the other server too."""
    key = {"ServiceAccount": "serviceAccountName", "PersistentVolumeClaim": "claimName",
           "ResourceClaimTemplate": "resourceClaimTemplateName"}  # fmt: skip
    text, there = str([pod for _, pod, _ in pods(objects)]), {(kind, name) for _, kind, name in objects}
    named = {(kind, name) for kind in key for name in re.findall(f"'{key[kind]}': '(.*?)'", text)}
    named |= {("Service", name) for name in re.findall(r"http://([\w-]+):8000", text)}
    yield from (f"there is no {kind} {name}" for kind, name in named - there)
    for (folder, kind, name), made in objects.items():
        if kind == "Service" and made["spec"]["selector"].get("app.kubernetes.io/component") not in name.split("-"):
            yield f"{folder}: {name} selects {made['spec']['selector']}"


def too_small(objects: Objects, deploy: Path) -> Iterator[str]:
    """Values that a cluster accepts and that fail later: a build that is refused, devices, disks, memory."""
    values = objects["cluster", "ConfigMap", "specdec"]["data"]
    of_name = {where: (pod, parts) for where, pod, parts in pods(objects)}
    build = of_name["jobs build"][1][0]
    filled = [re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], ""), word) for word in build["words"][3:]]
    spec = parse([word.replace("/checkpoints/", "Qwen/") for word in filled])
    try:
        spec.check()
    except UserError as error:
        yield f"compile.build: {error}"
        return
    if (spec.kernels, spec.recipe.toolchain) != ("nki", "neuron") or spec.target == spec.draft:
        yield f"the Job builds {spec}"
    if spec.jobs * JOB_BYTES > amount(build["resources"]["limits"]["memory"]):
        yield f"{spec.jobs} compilers need more than {build['resources']['limits']['memory']}"
    weights = spec.tp * make_plan(spec.bundle).weight_bytes
    for where, (pod, parts) in of_name.items():
        sizes = {v["name"]: amount(v["emptyDir"]["sizeLimit"]) for v in pod["volumes"] if "emptyDir" in v}
        disk, requests = sizes.get("scratch") or sizes.get("bundles"), parts[0]["resources"]["requests"]
        if disk and not 1.2 * weights < disk <= amount(requests["ephemeral-storage"]):
            yield f"{where}: {weights} bytes of weights on {disk}, requested {requests['ephemeral-storage']}"
    *_, server = of_name["overlays/device-plugin server-baseline"][1]
    count, requests = server["resources"]["limits"]["aws.amazon.com/neuron"], server["resources"]["requests"]
    if 2 * amount(requests["cpu"]) >= VCPUS or 2 * amount(requests["memory"]) >= MEMORY or 2 * count > DEVICES:
        yield f"two servers of {requests} and {count} devices do not fit a node"
    claim = objects["cluster", "ResourceClaimTemplate", "neurons"]["spec"]["spec"]["devices"]
    lnc = claim["config"][0]["opaque"]["parameters"]["logicalNeuronCore"]
    connected = claim["constraints"][0]["matchAttribute"] == f"resource.aws.com/devicegroup{count}_id"
    if not count * 8 == claim["requests"][0]["exactly"]["count"] * 8 == spec.tp * lnc or not connected:
        yield f"{count} devices of the plug-in or {claim} are not those of tp {spec.tp}"


LAWS: tuple[Law, ...] = (invalid, unknown_flags, unknown_variables, unknown_images, unsafe, dangling, too_small)
RENDERED = {key: made for folder in FOLDERS for key, made in render(DEPLOY, folder).items()}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_manifests_obey(law: Law) -> None:
    assert list(law(RENDERED, DEPLOY)) == []


FAULTS = [
    (invalid, "base/server.yaml", "containerPort: 8000", "containerPorts: 8000", "containerPort"),
    (unknown_flags, "jobs/build.yaml", "--max-len=", "--max-length=", "--max-length"),
    (unknown_flags, "base/server.yaml", "--additional-config=", "--extra-config=", "--extra-config"),
    (unknown_variables, "cluster/settings.env", "AWS_DEFAULT_REGION", "AWS_REGION", "nothing reads AWS_REGION"),
    (unknown_variables, "cluster/settings.env", "\nK=", "\nDRAFTS=", "K is not set"),
    (unknown_images, "Dockerfile", "COPY deploy/publish.py deploy/publish.py\n", "", "deploy.publish"),
    (unsafe, "base/server.yaml", "allowPrivilegeEscalation: false, ", "", "not confined"),
    (unsafe, "jobs/bench.yaml", "{name: results, mountPath: /results, readOnly: true}, ", "", "mounts no {'/results'}"),
    (dangling, "cluster/cluster.yaml", "{name: bench}", "{name: benchmark}", "no ServiceAccount bench"),
    (dangling, "overlays/baseline/kustomization.yaml", "includeSelectors: true", "includeSelectors: false", "selects"),
    (too_small, "cluster/settings.env", "BATCH=4\n", "BATCH=4096\n", "compile.build: "),
    (too_small, "cluster/settings.env", "DRAFT=Qwen3-1.7B", "DRAFT=Qwen3-32B", "Job builds"),
    (too_small, "cluster/settings.env", "TP=32", "TP=16", "tp 16"),
    (too_small, "jobs/build.yaml", "--jobs=16", "--jobs=64", "64 compilers"),
    (too_small, "base/server.yaml", "sizeLimit: 150Gi", "sizeLimit: 1Gi", "of weights on"),
    (too_small, "base/server.yaml", "cpu: 90", "cpu: 96", "do not fit a node"),
    (too_small, "overlays/device-plugin/kustomization.yaml", "value: 8", "value: 4", "4 devices of the plug-in"),
]


@pytest.mark.parametrize(("law", "file", "old", "new", "message"), FAULTS, ids=[f"{f[1]}-{f[3]}" for f in FAULTS])
def test_a_planted_fault_is_noticed(law: Law, file: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, deploy := tmp_path / "deploy")
    text = (deploy / file).read_text(encoding="utf-8")
    assert old in text
    (deploy / file).write_text(text.replace(old, new), encoding="utf-8")
    changed = [folder for folder in FOLDERS if folder.startswith(file.split("/", 1)[0].replace("base", "overlays"))]
    unchanged = {key: made for key, made in RENDERED.items() if key[0] not in changed}
    actual = list(
        law(unchanged | {key: made for folder in changed for key, made in render(deploy, folder).items()}, deploy)
    )
    assert any(message in sentence for sentence in actual), actual


def test_the_servers_differ_only_in_their_drafts() -> None:
    texts = {where: json.dumps(pod) for where, pod, _ in pods(RENDERED)}
    speculative, baseline = (texts[f"overlays/{name} server-{name}"] for name in ("speculative", "baseline"))
    assert speculative == baseline.replace(r", \"speculation\": false", "") != baseline


def test_nothing_is_secret_and_images_hold_what_they_install() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.rglob("*") if file.suffix in (".yaml", ".env"))
    assert not re.search(r"\b\d{12}\b|AKIA|hf_[A-Za-z0-9]{10}", text)
    assert set(re.findall(r"your-\w+", text)) == {"your-bucket", "your-registry"}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name in setup["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    tools, server = stages(DEPLOY).values()
    for stage, needed in ((tools, packages - {"serve"}), (server, packages | {"bench"})):
        assert needed | {"nkisim"} <= copied(stage)
        assert stage.index("USER 1000:1000") > max(stage.rindex("\nRUN"), stage.rindex("\nCOPY"))
    # next to an SDK, as `make device-install` does, with the store's packages
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndevice-install:")[1].split("\n\n")[0]
    named = {"safetensors", *recipe.split("safetensors ")[1].split(), *re.findall(r"torchax==\S+", recipe)}
    extras = setup["project"]["optional-dependencies"]
    assert named | {f"'{name}'" for name in extras["s3"] + extras["sign"]} <= set(tools.split())
