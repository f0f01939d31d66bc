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


def incompatibilities(objects: Objects, folder: str) -> Iterator[str]:
    """A build that is refused, devices that are not those of its ranks, servers that do not fit a node."""
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
    claim = objects[folder, "ResourceClaimTemplate", "neurons"]["spec"]["spec"]["devices"]
    exactly, count, needed = claim["requests"][0]["exactly"], spec.tp // 4, server["resources"]["requests"]
    named = f'device.attributes["neuron.aws.com"].instanceType == "{instance}"'
    disk, weights = next(v for v in pod["volumes"] if v["name"] == "bundles")["emptyDir"], spec.tp * plan.weight_bytes
    room = amount(pull["resources"]["requests"]["ephemeral-storage"])
    for right, sentence in (
        (spec.jobs * JOB_BYTES <= amount(build["resources"]["limits"]["memory"]), f"{spec.jobs} compilers need more"),
        (exactly["count"] == count, f"{exactly} at tp {spec.tp}"),
        (exactly["selectors"][0]["cel"]["expression"] == named, f"{exactly} at tp {spec.tp}"),
        (claim["constraints"][0]["matchAttribute"] == f"resource.aws.com/devicegroup{count}_id", f"{count} of {claim}"),
        (pod["nodeSelector"] == {"node.kubernetes.io/instance-type": instance}, f"node {pod['nodeSelector']}"),
        (objects[folder, "Deployment", "server-speculative"]["spec"]["replicas"] == replicas, f"not {replicas}"),
        (replicas * amount(needed["cpu"]) < cpus and replicas * amount(needed["memory"]) < memory
         and replicas * count <= devices, f"{replicas} servers of {needed}, {count} devices on a {instance}"),
        (1.2 * weights < amount(disk["sizeLimit"]) <= room, f"{weights} bytes of weights on {disk}"),
    ):  # fmt: skip
        if not right:
            yield sentence


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
    assert list(incompatibilities(objects, folder)) == []


FAULTS = [
    ("one-chip", "TP=4", "TP=2", "compile.build: a rank needs"), ("one-chip", "TP=4", "TP=8", "at tp 8"),
    ("one-chip", "devicegroup1_id", "devicegroup4_id", "1 of "),
    ("one-chip", '== "trn2.3xlarge"', '== "trn2.48xlarge"', "at tp 4"),
    ("one-chip", "instance-type: trn2.3xlarge", "instance-type: trn2.48xlarge", "node {"),
    ("one-chip", "--jobs=3", "--jobs=4", "4 compilers"),
    ("one-chip", "cpu: 10, memory: 104Gi}, l", "cpu: 12, memory: 104Gi}, l", "1 servers of"),
    ("one-chip", "bundles, emptyDir: {sizeLimit: 100Gi}", "bundles, emptyDir: {sizeLimit: 60Gi}", "bytes of weights"),
    ("replicas", "count: 16", "count: 12", "not 16"),
    ("one-chip", "104Gi}, limits: {memory: 104Gi}", "128Gi}, limits: {memory: 128Gi}", "16 servers of"),
]  # fmt: skip


@pytest.mark.parametrize(("overlay", "old", "new", "sentence"), FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_a_planted_fault_is_noticed(overlay: str, old: str, new: str, sentence: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, deploy := tmp_path / "deploy")
    file = deploy / "overlays" / overlay / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    folder = "overlays/replicas" if sentence.startswith("16") else f"overlays/{overlay}"
    violations = list(incompatibilities(rendered(deploy, folder), folder))
    assert any(sentence in each for each in violations), violations
