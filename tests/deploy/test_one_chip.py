"""The overlays of one chip: the laws of test_manifests.py, and sizes true of a trn2.3xlarge and of a trn2.48xlarge."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile.build import checked_plan
from compile.neuron.sdk import JOB_BYTES
from compile.spec import parse
from model.errors import UserError
from tests.deploy import test_manifests as manifests
from tests.deploy.test_manifests import DEPLOY, DEVICES, MEMORY, VCPUS, Objects, amount, pods, render

# CPUs, memory and devices. Source: Amazon EC2, instance types, Trn2
NODES = {"trn2.3xlarge": (12, 128 << 30, 1), "trn2.48xlarge": (VCPUS, MEMORY, DEVICES)}
# the instance of each overlay, and the servers on it
FOLDERS = {"overlays/one-chip": ("trn2.3xlarge", 1), "overlays/replicas": ("trn2.48xlarge", 16)}


def misfit(objects: Objects, folder: str) -> Iterator[str]:
    """A build that is refused, devices that are not those of its ranks, servers that are more than a node."""
    instance, replicas = FOLDERS[folder]
    cpus, memory, devices = NODES[instance]
    values = objects[folder, "ConfigMap", "specdec"]["data"]
    of_name = {where: (pod, parts) for where, pod, parts in pods(objects)}
    (_, (build, *_)), (pod, (pull, server)) = of_name[f"{folder} build"], of_name[f"{folder} server-speculative"]
    words = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in build["words"][3:]]
    # no compiler is here
    spec = parse([word.replace("/checkpoints/", "Qwen/") for word in words if not word.startswith("--recipe=")])
    try:
        plan = checked_plan(spec)
    except UserError as error:
        yield f"compile.build: {error}"
        return
    if spec.jobs * JOB_BYTES > amount(build["resources"]["limits"]["memory"]):
        yield f"{spec.jobs} compilers need more than {build['resources']['limits']['memory']}"
    claim = objects[folder, "ResourceClaimTemplate", "neurons"]["spec"]["spec"]["devices"]
    (request,), count = claim["requests"], spec.tp // 4
    named = f'device.attributes["neuron.aws.com"].instanceType == "{instance}"'
    if (request["exactly"]["count"], request["exactly"]["selectors"][0]["cel"]["expression"]) != (count, named):
        yield f"{request} are not the devices of tp {spec.tp} on a {instance}"
    if claim["constraints"][0]["matchAttribute"] != f"resource.aws.com/devicegroup{count}_id":
        yield f"{count} devices are of {claim['constraints']}"
    if pod["nodeSelector"] != {"node.kubernetes.io/instance-type": instance}:
        yield f"the server runs on {pod['nodeSelector']}"
    if objects[folder, "Deployment", "server-speculative"]["spec"]["replicas"] != replicas:
        yield f"there are not {replicas} servers"
    needed = server["resources"]["requests"]
    if not all(replicas * amount(needed[name]) < most for name, most in (("cpu", cpus), ("memory", memory))):
        yield f"{replicas} servers of {needed} do not fit a {instance}"
    if replicas * count > devices:
        yield f"{replicas} servers of {count} devices do not fit a {instance}"
    disk = amount(next(v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "bundles"))
    if not 1.2 * spec.tp * plan.weight_bytes < disk <= amount(pull["resources"]["requests"]["ephemeral-storage"]):
        yield f"{spec.tp * plan.weight_bytes} bytes of weights on {disk}"


def rendered(deploy: Path, folder: str) -> Objects:
    """The objects of an overlay, which has all that it names; the laws look for settings in the folder cluster."""
    objects = render(deploy, folder)
    return objects | {("cluster", kind, name): o for (_, kind, name), o in objects.items() if kind == "ConfigMap"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_overlays_obey(folder: str) -> None:
    objects = rendered(DEPLOY, folder)
    laws: tuple[Any, ...] = tuple(law for law in manifests.LAWS if law is not manifests.too_small)
    # PROMPTS is of the Job bench, which compares two servers
    assert [sentence for law in laws for sentence in law(objects, DEPLOY)] == ["nothing reads PROMPTS"]
    assert list(misfit(objects, folder)) == []


FAULTS = [
    ("one-chip", "TP=4", "TP=2", "compile.build: a rank needs"),
    ("one-chip", "TP=4", "TP=8", "are not the devices of tp 8"),
    ("one-chip", "devicegroup1_id", "devicegroup4_id", "1 devices are of"),
    ("one-chip", '== "trn2.3xlarge"', '== "trn2.48xlarge"', "are not the devices of tp 4"),
    ("one-chip", "instance-type: trn2.3xlarge", "instance-type: trn2.48xlarge", "the server runs on"),
    ("one-chip", "--jobs=3", "--jobs=4", "4 compilers"),
    ("one-chip", "cpu: 10, memory: 104Gi}, l", "cpu: 12, memory: 104Gi}, l", "do not fit a trn2.3xlarge"),
    (
        "one-chip",
        "bundles, emptyDir: {sizeLimit: 100Gi}",
        "bundles, emptyDir: {sizeLimit: 60Gi}",
        "bytes of weights on",
    ),
    ("replicas", "count: 16", "count: 12", "there are not 16 servers"),
    ("one-chip", "104Gi}, limits: {memory: 104Gi}", "128Gi}, limits: {memory: 128Gi}", "16 servers of"),
]


@pytest.mark.parametrize(("overlay", "old", "new", "said"), FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_a_planted_fault_is_noticed(overlay: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, deploy := tmp_path / "deploy")
    file = deploy / "overlays" / overlay / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    folder = "overlays/replicas" if said.startswith("16") else f"overlays/{overlay}"
    found = list(misfit(rendered(deploy, folder), folder))
    assert any(said in sentence for sentence in found), found
