"""The defects of the published sample's manifests, numbered as in the project's list of them, are not here.

Each check is a function of a rendered folder, and each is shown to find its defect when it is put back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.serving.cloudwatch import dimension
from deploy.render import render
from tests.deploy.rendered import (
    changed,
    container,
    containers,
    environment,
    every_text,
    flags,
    manifests,
    one,
    pods,
    policies,
    speculative_config,
)


def b1_one_k(out: Path) -> bool:
    said = {int(k) for k in re.findall(r"-k(\d+)\b", every_text(out))}
    return said == {int(flags(container(out, "load-test", "load-test")["command"])["k"])}


def b2_what_is_pushed_is_what_is_served(out: Path) -> bool:
    pushed = {container(out, f"compile-{v}", "push")["command"][4].rsplit("/", 1)[1] for v in VARIANTS}
    served = {environment(container(out, f"-{v}", "server"))["NEURON_COMPILED_ARTIFACTS"] for v in VARIANTS}
    return len(served) == 2 and pushed == {path.rsplit("/", 1)[1] for path in served}


def overrides(out: Path, variant: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        flags(container(out, f"-{variant}", "server")["command"])["override-neuron-config"]
    )
    return found


def b3_fused_speculation_is_asked_for(out: Path) -> bool:
    return overrides(out, "speculative").get("enable_fused_speculation") is True


def b4_devices_times_cores_is_tp(out: Path) -> bool:
    devices = one(out, "ResourceClaimTemplate")["spec"]["spec"]["devices"]
    lnc = devices["config"][0]["opaque"]["parameters"]["logicalNeuronCore"]
    tp = int(flags(container(out, "-baseline", "server")["command"])["tensor-parallel-size"])
    return bool(devices["requests"][0]["exactly"]["count"] * 8 == tp * lnc)


def b5_claims_are_of_the_documented_form(out: Path) -> bool:
    template = one(out, "ResourceClaimTemplate")
    devices = template["spec"]["spec"]["devices"]
    config = devices["config"][0]["opaque"]["parameters"]
    nested = set(devices["requests"][0]) == {"name", "exactly"}
    return template["apiVersion"] == "resource.k8s.io/v1" and nested and config["apiVersion"] == "neuron.aws.com/v1"


def b6_a_plain_draft_is_not_called_eagle(out: Path) -> bool:
    return "method" not in speculative_config(out) and "eagle" not in every_text(out).lower()


def b7_the_draft_is_as_long_as_the_target(out: Path) -> bool:
    length = int(flags(container(out, "-speculative", "server")["command"])["max-model-len"])
    return bool(speculative_config(out)["max_model_len"] == length)


def b8_the_servers_differ_in_speculation_alone(out: Path) -> bool:
    commands = {v: flags(container(out, f"-{v}", "server")["command"]) for v in VARIANTS}
    for found in commands.values():
        found.pop("speculative-config", None)
        override = json.loads(found.pop("override-neuron-config"))
        override.pop("enable_fused_speculation", None)
        if override != {"save_sharded_checkpoint": True}:
            return False
    rest = []
    for variant in VARIANTS:
        server = dict(container(out, f"-{variant}", "server"))
        server.pop("command")
        variables = environment(server)
        variables.pop("NEURON_COMPILED_ARTIFACTS")
        rest.append(server | {"env": variables})
    return commands["baseline"] == commands["speculative"] and rest[0] == rest[1]


def b9_no_hub_at_start(out: Path) -> bool:
    servers = [container(out, f"-{v}", "server") for v in VARIANTS]
    local = all(s["command"][2].startswith("/") for s in servers) and speculative_config(out)["model"].startswith("/")
    return local and all(environment(s).get("HF_HUB_OFFLINE") == "1" for s in servers)


def b10_no_account_and_one_region(out: Path) -> bool:
    regions = set(re.findall(r"\b[a-z]{2}-[a-z]+-\d\b", every_text(out)))
    return not re.search(r"\b\d{12}\b", every_text(out)) and regions == {"us-west-2"}


def b11_the_bucket_is_read_only_and_the_volume_unique(out: Path) -> bool:
    spec = one(out, "PersistentVolume")["spec"]
    mounts = [m for _, pod in pods(out) for c in containers(pod) for m in c["volumeMounts"] if m["name"] == "bucket"]
    options = {o.split("=")[0] for o in spec["mountOptions"]}
    wanted = {"read-only", "allow-other", "uid", "gid", "region", "prefix"}
    return (
        spec["accessModes"] == ["ReadOnlyMany"]
        and options == wanted
        and all(m.get("readOnly") for m in mounts)
        and spec["csi"]["volumeHandle"] == one(out, "PersistentVolume")["metadata"]["name"] != "s3-csi-driver-volume"
    )


def b12_policies_are_small_and_the_drivers_account_is_not_ours(out: Path) -> bool:
    statements = [s for name, p in policies(out).items() if name != "trust" for s in p["Statement"]]
    for statement in statements:
        unbounded = statement["Resource"] == "*" and "cloudwatch:namespace" not in json.dumps(
            statement.get("Condition")
        )
        if unbounded or any("*" in action for action in statement["Action"]):
            return False
    accounts = [m["metadata"]["name"] for m in manifests(out) if m["kind"] == "ServiceAccount"]
    return len(accounts) == len(set(accounts)) and "FullAccess" not in every_text(out) and "s3-csi" not in str(accounts)


def b13_the_quality_job_can_run(out: Path) -> bool:
    job = one(out, "Job", "quality")["spec"]["template"]["spec"]
    accounts = {m["metadata"]["name"] for m in manifests(out) if m["kind"] == "ServiceAccount"}
    written = [flags(c["command"])["output_path"] for c in job["initContainers"] if c["command"][0] == "lm_eval"]
    kept = job["containers"][0]["command"][3]
    first = job["initContainers"][0]["command"]
    # whole folders are kept: the evaluation names its files by the time
    return (
        job["serviceAccountName"] in accounts
        and "nodeSelector" not in job
        and len(written) == 2
        and all(path.startswith(kept + "/") for path in written)
        and "bench.serving" in first
        and "--limit" not in every_text(out)
    )


def b14_every_file_and_job_is_there(out: Path) -> bool:
    resources = yaml.safe_load((out / "base/kustomization.yaml").read_text())["resources"]
    wanted = {"compile-baseline.yaml", "compile-speculative.yaml", "load-test.yaml", "quality.yaml"}
    return all((out / "base" / r).is_file() for r in resources) and {f.name for f in (out / "jobs").iterdir()} == wanted


def b15_pods_are_whole(out: Path) -> bool:
    found = [c for _, pod in pods(out) for c in containers(pod)]
    sized = all(
        c["resources"]["requests"] == c["resources"]["limits"]
        and {"cpu", "memory"} <= c["resources"]["requests"].keys()
        for c in found
    )
    shells = any(c["command"][0].rsplit("/", 1)[-1] in ("sh", "bash") for c in found)
    installs = re.search(r"pip install|apt-get|git clone|set -x", every_text(out))
    deployments = [m for m in manifests(out) if m["kind"] == "Deployment"]
    # a new server never waits for devices that an old one holds
    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    recreated = all(d["spec"]["strategy"] == one_by_one for d in deployments)
    guarded = {m["metadata"]["name"] for m in manifests(out) if m["kind"] == "PodDisruptionBudget"}
    pinned = all(re.search(r":[\w.-]*\d[\w.-]*$|@sha256:", c["image"]) for c in found)
    apart = all("podAntiAffinity" in d["spec"]["template"]["spec"]["affinity"] for d in deployments)
    named = {d["metadata"]["name"] for d in deployments}
    return sized and not shells and not installs and recreated and apart and pinned and guarded == named


def probes(out: Path) -> list[dict[str, Any]]:
    servers = [container(out, f"-{v}", "server") for v in VARIANTS]
    return [s[p] for s in servers for p in ("startupProbe", "readinessProbe", "livenessProbe")]


def b16_no_probe_waits_longer_than_its_period(out: Path) -> bool:
    return all(p["timeoutSeconds"] <= p["periodSeconds"] for p in probes(out))


def b17_the_load_test_reports_latency_by_usage(out: Path) -> bool:
    command = container(out, "load-test", "load-test")["command"]
    return "bench.serving" in command and "llmperf" not in every_text(out).lower()


def b18_the_engine_is_named(out: Path) -> bool:
    return all(environment(container(out, f"-{v}", "server")).get("VLLM_USE_V1") == "0" for v in VARIANTS)


def b19_no_shell_builds_a_dimension(out: Path) -> bool:
    text = every_text(out)
    return not re.search(r"\bjq\b|put-metric-data|\btr '", text) and dimension("the cat sat. ") == "the_cat_sat."


def b20_nothing_but_manifests_and_policies(out: Path) -> bool:
    return {f.suffix for f in out.rglob("*") if f.is_file()} == {".yaml", ".json"}


VARIANTS = ("baseline", "speculative")
CHECKS: dict[str, Callable[[Path], bool]] = {
    name: check for name, check in list(globals().items()) if re.match(r"b\d+_", name)
}
SPEC, BASE, BUCKET, DEVICES = "base/speculative.yaml", "base/baseline.yaml", "base/bucket.yaml", "base/devices.yaml"
QUALITY, LOAD = "jobs/quality.yaml", "jobs/load-test.yaml"
# file, what stands there, what the published manifests had in its place
DEFECTS: dict[str, tuple[str, str, str]] = {
    "b1": (SPEC, "s1024-bf16-k7", "s1024-bf16-k15"),
    "b2": (SPEC, "value: /bundle/qwen3-32b-qwen3-1.7b-tp32-b4-s1024-bf16-k7", "value: /bundle/Qwen-32B-SD-STEPS15"),
    "b3": (SPEC, ', "enable_fused_speculation": true', ""),
    "b4": (DEVICES, "logicalNeuronCore: 2", "logicalNeuronCore: 1"),
    "b5": (DEVICES, "neuron.aws.com/v1\n", "neuron.aws.com/v1alphav1\n"),
    "b6": (SPEC, '"max_model_len": 1017}', '"max_model_len": 1024, "method": "eagle"}'),
    "b7": (SPEC, '"max_model_len": 1017}', '"max_model_len": 2048}'),
    "b8": (BASE, '{"save_sharded_checkpoint": true}', "{}"),
    "b9": (SPEC, "/mnt/bucket/checkpoints/Qwen3-32B", "Qwen/Qwen3-32B"),
    "b10": (BUCKET, "region=us-west-2", "region=ap-southeast-4"),
    "b11": (BUCKET, "read-only", "allow-overwrite"),
    "b12": ("iam/compile.json", "s3:GetObject", "s3:*"),
    "b13": (QUALITY, "serviceAccountName: qwen3-specdec-bench", "serviceAccountName: di-llmperf"),
    "b14": ("base/kustomization.yaml", "devices.yaml", "xxl-trn2-rct.yaml"),
    "b15": (SPEC, "- vllm\n        - serve", "- /bin/bash\n        - -exc"),
    "b16": (SPEC, "timeoutSeconds: 5\n", "timeoutSeconds: 50\n"),
    "b17": (LOAD, "bench.serving", "llmperf"),
    "b18": (SPEC, "VLLM_USE_V1", "VLLM_USE_V2"),
    "b19": (LOAD, "bench.serving", "jq"),
    "b20": (LOAD, "", ""),
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    render(changed(), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CHECKS)
def test_the_defect_is_not_here(name: str, out: Path) -> None:
    assert CHECKS[name](out)


@pytest.mark.parametrize("number", DEFECTS)
def test_the_check_finds_the_defect_when_it_is_put_back(number: str, out: Path) -> None:
    check = next(check for name, check in CHECKS.items() if name.startswith(number + "_"))
    file, good, bad = DEFECTS[number]
    text = (out / file).read_text(encoding="utf-8")
    assert good in text
    if number == "b20":
        (out / "base/.gitkeep").write_text("content", encoding="utf-8")
    else:
        (out / file).write_text(text.replace(good, bad, 1), encoding="utf-8")
    assert not check(out)


def test_every_defect_has_its_check() -> None:
    assert [name.split("_")[0] for name in CHECKS] == [f"b{i}" for i in range(1, 21)] == list(DEFECTS)
