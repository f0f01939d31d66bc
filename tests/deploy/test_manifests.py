"""The manifests: valid by Kubernetes' schemas, as kustomize merges them; restricted pods; values that agree."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils

from compile.spec import parse
from tests.deploy.test_dockerfile import ROOT

DEPLOY = ROOT / "deploy"
OVERLAYS = ("overlays/speculative", "overlays/baseline")
Manifest = dict[str, Any]


def kustomization(folder: str) -> Manifest:
    read: Manifest = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text(encoding="utf-8"))
    return read


def rendered(folder: str) -> list[Manifest]:
    """The objects of a folder as far as kustomize changes them here: suffix, component, the patch, image names."""
    rules = kustomization(folder)
    if folder in OVERLAYS:
        objects, suffix = rendered("base"), rules["nameSuffix"]
        for made in objects:
            made["metadata"]["name"] += suffix
        for patch in (yaml.safe_load(p["patch"])[0] for p in rules.get("patches", [])):
            container(objects[0], "server")["args"] = patch["value"]
        return objects
    texts = [(DEPLOY / folder / name).read_text(encoding="utf-8") for name in rules["resources"]]
    objects = [made for text in texts for made in yaml.safe_load_all(text)]
    for made in (c for o in objects for c in containers(o)):
        made["image"] = next(f"{i['newName']}:{i['newTag']}" for i in rules["images"] if i["name"] == made["image"])
    return objects


def pod(made: Manifest) -> Manifest:
    return made["spec"]["template"]["spec"] if made["kind"] in ("Deployment", "Job") else {"containers": []}


def containers(made: Manifest) -> list[Manifest]:
    return [*pod(made).get("initContainers", []), *pod(made)["containers"]]


def container(made: Manifest, name: str) -> Manifest:
    return next(c for c in containers(made) if c["name"] == name)


OBJECTS = {(f, o["kind"], o["metadata"]["name"]): o for f in ("cluster", "jobs", *OVERLAYS) for o in rendered(f)}
PODS = [o for o in OBJECTS.values() if pod(o)["containers"]]
SETTINGS = dict(
    line.split("=", 1) for line in (DEPLOY / "cluster/settings.env").read_text().splitlines() if "=" in line
)


@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_every_object_fits_the_strict_schema(version: str) -> None:
    for made in OBJECTS.values():
        assert utils.validate(made, version, strict=True) == version
    spoiled = copy.deepcopy(OBJECTS["overlays/baseline", "Deployment", "server-baseline"])
    spoiled["spec"]["replica"] = 1
    with pytest.raises(utils.ValidationError):
        utils.validate(spoiled, version, strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed: kustomize itself was not run")
@pytest.mark.parametrize("folder", ["cluster", "jobs", *OVERLAYS])
def test_kustomize_renders_what_is_read_here(folder: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    made = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    named = {(folder, o["kind"], o["metadata"]["name"]): o for o in made if o["kind"] != "ConfigMap"}
    assert set(named) == {key for key in OBJECTS if key[0] == folder}
    assert all(containers(o) == containers(OBJECTS[key]) for key, o in named.items())
    assert all(o["metadata"].get("namespace", "specdec") == "specdec" for o in made)


def test_the_variants_differ_in_their_drafts_alone() -> None:
    speculative, baseline = (rendered(folder)[0] for folder in OVERLAYS)
    options = [
        json.loads(container(o, "server")["args"][0].removeprefix("--additional-config="))
        for o in (speculative, baseline)
    ]
    assert options == [{"platform": "nrt"}, {"platform": "nrt", "speculation": False}]
    container(baseline, "server")["args"] = container(speculative, "server")["args"]
    baseline["metadata"]["name"] = speculative["metadata"]["name"]
    assert baseline == speculative
    for folder in OVERLAYS:
        (labels,) = kustomization(folder)["labels"]
        assert labels == {"pairs": {"app.kubernetes.io/component": folder.split("/")[1]}, "includeSelectors": True}


@pytest.mark.parametrize("made", PODS, ids=lambda made: made["metadata"]["name"])
def test_pods_are_restricted_and_start_no_shell(made: Manifest) -> None:
    spec = pod(made)
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)
    volumes = {volume["name"] for volume in spec["volumes"]}
    for part in containers(made):
        assert part["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert part["command"][0] in ("python", "vllm")
        assert {mount["name"] for mount in part["volumeMounts"]} <= volumes
        assert {"memory"} <= part["resources"]["limits"].keys()
        words = " ".join([*part["command"], *part.get("args", [])])
        assert set(re.findall(r"\$\((\w+)\)", words)) <= SETTINGS.keys()
        assert not part["image"].endswith((":latest", "server", "tools"))


def test_settings_devices_accounts_and_addresses_agree() -> None:
    claim = OBJECTS["cluster", "ResourceClaimTemplate", "neurons"]["spec"]["spec"]["devices"]
    (neurons,), cores = claim["requests"], claim["config"][0]["opaque"]["parameters"]["logicalNeuronCore"]
    assert neurons["exactly"]["count"] * 8 == int(SETTINGS["TP"]) * cores
    assert claim["constraints"][0]["matchAttribute"].endswith(f"devicegroup{neurons['exactly']['count']}_id")
    accounts = {name for _, kind, name in OBJECTS if kind == "ServiceAccount"}
    assert {pod(made)["serviceAccountName"] for made in PODS} == accounts
    services = {name for _, kind, name in OBJECTS if kind == "Service"}
    words = containers(OBJECTS["jobs", "Job", "bench"])[0]["command"]
    assert set(re.findall(r"http://([\w-]+):8000", " ".join(words))) == services
    # what the Job builds is what compile.build takes
    command = containers(OBJECTS["jobs", "Job", "build"])[0]["command"]
    filled = [re.sub(r"\$\((\w+)\)", lambda name: SETTINGS[name[1]], word) for word in command[3:]]
    spec = parse([re.sub("/checkpoints/", "Qwen/", word) for word in filled])
    spec.check()
    assert (spec.k, spec.tp, spec.kernels, spec.recipe.toolchain) == ("7", 32, "nki", "neuron")


def test_no_secret_account_or_unfilled_value_but_bucket_and_registry() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.rglob("*") if file.is_file())
    assert not re.search(r"\b\d{12}\b|AKIA|hf_[A-Za-z0-9]{10}", text)
    assert set(re.findall(r"your-\w+", text)) == {"your-bucket", "your-registry"}
