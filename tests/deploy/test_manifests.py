"""The manifests: valid by Kubernetes' schemas, as kustomize merges them; restricted pods; values that agree."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from kubernetes_validate import utils

from compile.spec import parse

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, SPECULATIVE, BASELINE = ROOT / "deploy", "overlays/speculative", "overlays/baseline"
Manifest = dict[str, Any]


def read(folder: str) -> list[Manifest]:
    """The objects of a folder as far as kustomize changes them here: suffix, component, the patch, image names."""
    rules = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if "nameSuffix" in rules:
        objects = read("base")
        for made in objects:
            made["metadata"]["name"] += rules["nameSuffix"]
        for patch in rules.get("patches", []):
            containers(objects[0])[-1]["args"] = yaml.safe_load(patch["patch"])[0]["value"]
        return objects
    texts = [(DEPLOY / folder / name).read_text(encoding="utf-8") for name in rules["resources"]]
    objects = [*yaml.safe_load_all("---\n".join(texts))]
    for part in (c for o in objects for c in containers(o)):
        part["image"] = next(f"{i['newName']}:{i['newTag']}" for i in rules["images"] if i["name"] == part["image"])
    return objects


def pod(made: Manifest) -> Manifest:
    return made["spec"]["template"]["spec"] if made["kind"] in ("Deployment", "Job") else {"containers": []}


def containers(made: Manifest) -> list[Manifest]:
    return [*pod(made).get("initContainers", []), *pod(made)["containers"]]


FOLDERS = ("cluster", "jobs", SPECULATIVE, BASELINE)
OBJECTS = {(f, o["kind"], o["metadata"]["name"]): o for f in FOLDERS for o in read(f)}
PODS = [o for o in OBJECTS.values() if containers(o)]
LINES = (DEPLOY / "cluster/settings.env").read_text(encoding="utf-8").splitlines()
SETTINGS = dict(line.split("=", 1) for line in LINES if not line.startswith("#"))


@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_every_object_fits_the_strict_schema(version: str) -> None:
    assert {utils.validate(made, version, strict=True) for made in OBJECTS.values()} == {version}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed: kustomize itself was not run")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_renders_what_is_read_here(folder: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    made = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    named = {(folder, o["kind"], o["metadata"]["name"]): o for o in made if o["kind"] != "ConfigMap"}
    assert set(named) == {key for key in OBJECTS if key[0] == folder}
    assert all(containers(o) == containers(OBJECTS[key]) for key, o in named.items())
    if folder in (SPECULATIVE, BASELINE):
        assert all(folder.split("/")[1] in str(o["spec"]["selector"]) for o in made)


def test_the_servers_differ_in_their_drafts_alone() -> None:
    speculative, baseline = (read(folder)[0] for folder in (SPECULATIVE, BASELINE))
    options = [containers(o)[-1].pop("args") for o in (speculative, baseline)]
    assert options == [
        [f'--additional-config={{"platform": "neuron"{more}}}'] for more in ("", ', "speculation": false')
    ]
    assert speculative["spec"] == baseline["spec"]


@pytest.mark.parametrize("made", PODS, ids=lambda made: made["metadata"]["name"])
def test_pods_are_restricted_and_start_no_shell(made: Manifest) -> None:
    assert (pod(made)["securityContext"]["runAsNonRoot"], pod(made)["automountServiceAccountToken"]) == (True, False)
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for part in containers(made):
        assert part["securityContext"] == confined
        assert part["command"][0] in ("python", "vllm")
        assert {mount["name"] for mount in part["volumeMounts"]} <= {volume["name"] for volume in pod(made)["volumes"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(part["command"]))) <= SETTINGS.keys()
        assert re.search(r":\d", part["image"])


def test_settings_devices_accounts_and_addresses_agree() -> None:
    claim = OBJECTS["cluster", "ResourceClaimTemplate", "neurons"]["spec"]["spec"]["devices"]
    count, cores = (claim["requests"][0]["exactly"]["count"], claim["config"][0]["opaque"]["parameters"])
    assert count * 8 == int(SETTINGS["TP"]) * cores["logicalNeuronCore"]
    assert claim["constraints"][0]["matchAttribute"].endswith(f"devicegroup{count}_id")
    named = {kind: {name for _, of, name in OBJECTS if of == kind} for kind in ("ServiceAccount", "Service")}
    assert {pod(made)["serviceAccountName"] for made in PODS} == named["ServiceAccount"]
    words = " ".join(containers(OBJECTS["jobs", "Job", "bench"])[0]["command"])
    assert set(re.findall(r"http://([\w-]+):8000", words)) == named["Service"]
    # what the Job builds is what compile.build takes
    command = containers(OBJECTS["jobs", "Job", "build"])[0]["command"][3:]
    filled = [re.sub(r"\$\((\w+)\)", lambda name: SETTINGS[name[1]], word) for word in command]
    spec = parse([word.replace("/checkpoints/", "Qwen/") for word in filled])
    spec.check()
    assert (spec.k, spec.tp, spec.kernels, spec.recipe.toolchain) == ("7", 32, "nki", "neuron")


def test_nothing_is_secret_or_unversioned_and_images_copy_what_they_install() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.rglob("*") if file.is_file())
    assert not re.search(r"\b\d{12}\b|AKIA|hf_[A-Za-z0-9]{10}|:latest", text)
    assert set(re.findall(r"your-\w+", text)) == {"your-bucket", "your-registry"}
    tools, server = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[1:]
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {name for name in setup["packages"]["find"]["include"] if "." not in name}
    for stage, needed in ((tools, packages - {"serve"}), (server, packages | {"bench"})):
        copied = {word for line in re.findall(r"^COPY (.*) \S+$", stage, re.M) for word in line.split()}
        assert needed | {"nkisim"} <= copied
        assert all((ROOT / source).exists() for source in copied)
    assert server.index("USER 1000:1000") > max(server.rindex("\nRUN"), server.rindex("\nCOPY"))
