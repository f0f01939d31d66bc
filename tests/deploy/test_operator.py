"""What an operator relies on: only what can be served is pushed, names carry content, pods are confined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from bench.serving.options import parse as parse_serving
from deploy import check as cluster
from deploy.expected import Expected
from deploy.push import push_servable
from deploy.render import render
from model.errors import UserError
from tests.deploy.rendered import SET, changed, container, containers, manifests, one, pods, policies

ANSWERS = Path(__file__).with_name("cluster")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    render(changed(), folder)
    return folder


def test_the_compile_jobs_refuse_to_begin_without_the_sdk(out: Path) -> None:
    for variant in ("baseline", "speculative"):
        command = container(out, f"compile-{variant}", "build")["command"]
        assert command[command.index("--toolchain") + 1] == "neuron"


def test_a_bundle_that_its_server_would_refuse_is_not_pushed(tmp_path: Path) -> None:
    manifest = {"tp": 32, "batch": 4, "max_len": 1024, "k": 7, "neff": "none", "files": {}}

    class Read:
        def __init__(self, path: Path) -> None:
            self.manifest = manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.push.read_bundle", Read)
        with pytest.raises(UserError, match="without the Neuron SDK"):
            push_servable(tmp_path, str(tmp_path / "store"), Expected(32, 4, 1024, 7, 2, "chain"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "change",
    [{"images": {"tools": "registry.internal/specdec-tools:0.2.0"}}, {"model": {"draft_folder": "checkpoints/other"}}],
    ids=["image", "checkpoint"],
)
def test_an_upgrade_has_names_of_its_own(change: dict[str, Any], out: Path, tmp_path: Path) -> None:
    render(changed(**change), tmp_path)

    def names(folder: Path) -> set[str]:
        jobs = {m["metadata"]["name"] for m in manifests(folder) if m["kind"] == "Job"}
        return jobs | {container(folder, f"compile-{v}", "push")["command"][4] for v in ("baseline", "speculative")}

    assert not names(out) & names(tmp_path)
    assert all(len(name) <= 63 for name in names(out) if not name.startswith("s3"))


def test_the_longest_name_fits_a_label(tmp_path: Path) -> None:
    render(changed(name="a" * 30), tmp_path)
    assert max(len(m["metadata"]["name"]) for m in manifests(tmp_path) if m["kind"] == "Job") <= 63


def restricted(spec: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What a container lacks of Kubernetes' `restricted` level, and a root file system that it cannot write."""
    context = found["securityContext"]
    rules = {
        "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser") != 0,
        "escalation": context.get("allowPrivilegeEscalation") is False,
        "capabilities": context.get("capabilities") == {"drop": ["ALL"]},
        "seccomp": context.get("seccompProfile") == {"type": "RuntimeDefault"},
        "root file system": context.get("readOnlyRootFilesystem") is True,
        "volumes": all(set(v) - {"name"} <= {"emptyDir", "persistentVolumeClaim"} for v in spec["volumes"]),
        "host": not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    }
    return [name for name, held in rules.items() if not held]


def test_every_container_but_the_servers_is_restricted(out: Path) -> None:
    for owner, spec in pods(out):
        for found in containers(spec):
            lacks = ["runAsNonRoot", "root file system"] if found["name"] == "server" else []
            assert restricted(spec, found) == lacks, f"{owner} {found['name']}"
            if not lacks:
                assert {"name": "tmp", "mountPath": "/tmp"} in found["volumeMounts"]
    marks = one(out, "Namespace")["metadata"]["labels"]
    assert marks["pod-security.kubernetes.io/enforce"] == "baseline"
    assert marks["pod-security.kubernetes.io/warn"] == "restricted"


def test_servers_and_clients_share_the_operator_s_key(out: Path) -> None:
    wanted = {"secretKeyRef": {"name": "specdec-api-key", "key": "api-key"}}
    keyed = {
        (found["name"], e["name"]): e["valueFrom"]
        for _, spec in pods(out)
        for found in containers(spec)
        for e in found["env"]
        if "valueFrom" in e
    }
    assert set(keyed) == {
        ("server", "VLLM_API_KEY"),
        ("load-test", "OPENAI_API_KEY"),
        ("equality", "OPENAI_API_KEY"),
        ("lm-eval-baseline", "OPENAI_API_KEY"),
        ("lm-eval-speculative", "OPENAI_API_KEY"),
    }
    assert all(value == wanted for value in keyed.values())


def test_the_network_denies_all_but_what_is_listed(out: Path) -> None:
    rules = {m["metadata"]["name"]: m["spec"] for m in manifests(out) if m["kind"] == "NetworkPolicy"}
    assert rules.pop("qwen3-specdec-deny-all") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    components = {s["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: s for s in rules.values()}
    made = {
        spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for spec in (m["spec"] for m in manifests(out) if m["kind"] in ("Deployment", "Job"))
    }
    assert set(components) == made
    for name in ("baseline", "speculative"):
        assert components[name]["policyTypes"] == ["Ingress"], "a server calls nobody"
        callers = [
            c["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for c in components[name]["ingress"][0]["from"]
            if "podSelector" in c
        ]
        assert callers == ["load-test", "quality"]
    for name in ("compile-baseline", "compile-speculative", "load-test", "quality"):
        assert components[name]["policyTypes"] == ["Egress"], "nobody calls a Job"


def test_a_manifest_is_never_replaced(out: Path) -> None:
    denied = [s for s in policies(out)["compile"]["Statement"] if s["Effect"] == "Deny"]
    assert denied == [
        {
            "Effect": "Deny",
            "Action": "s3:PutObject",
            "Resource": "arn:aws:s3:::specdec-artifacts/team/bundles/*/manifest.json",
            "Condition": {"Null": {"s3:if-none-match": "true"}},
        }
    ]


def test_the_dashboard_asks_for_both_servers(out: Path) -> None:
    board = json.loads((out / "grafana/dashboard.json").read_text(encoding="utf-8"))
    assert len(board["panels"]) == 8
    for panel in board["panels"]:
        for target, service in zip(
            panel["targets"], ("qwen3-specdec-baseline", "qwen3-specdec-speculative"), strict=True
        ):
            assert f'service="{service}"' in target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")
            assert "{of}" not in target["expr"]
            assert "{{" not in target["expr"]


def test_the_load_test_s_options_are_unchanged(out: Path) -> None:
    command = container(out, "load-test", "load-test")["command"]
    assert parse_serving(command[command.index("bench.serving") + 1 :]).concurrency == 4


def answers(name: str) -> cluster.Kubectl:
    """kubectl's recorded answers of one cluster."""
    recorded = json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))

    def ask(*arguments: str) -> Any:
        return recorded.get(" ".join(arguments))

    return ask


def test_recorded_answers_are_objects_of_the_published_api() -> None:
    """Whole and strictly valid for the version that they name: what the check reads is called so there."""
    recorded = json.loads((ANSWERS / "ready.json").read_text(encoding="utf-8"))
    version = "{major}.{minor}".format_map(recorded.pop("version")["serverVersion"])
    objects = [o for answer in recorded.values() for o in answer.get("items", [answer])]
    assert {o["kind"] for o in objects} == {"DeviceClass", "ResourceSlice", "Node", "CSIDriver", "DaemonSet", "Secret"}
    for of_cluster in objects:
        kubernetes_validate.validate(of_cluster, version, strict=True)
    slices = next(o for o in objects if o["kind"] == "ResourceSlice")
    slices["spec"]["device"] = slices["spec"].pop("devices")
    with pytest.raises(kubernetes_validate.ValidationError, match="device"):
        kubernetes_validate.validate(slices, version, strict=True)


def test_a_ready_cluster_lacks_nothing() -> None:
    assert [f.question for f in cluster.findings(changed(), answers("ready")) if not f.held] == []


def test_an_empty_cluster_lacks_everything_but_old_jobs() -> None:
    held = [f.question for f in cluster.findings(changed(), answers("empty")) if f.held]
    assert held == ["no Job of this version was run before"]


@pytest.mark.parametrize(
    ("call", "answer", "question"),
    [
        ("version", {"serverVersion": {"major": "1", "minor": "33+"}}, "the manifests fit the control plane"),
        ("get nodes", {"items": [{"metadata": {"labels": {}}}]}, "there are nodes for both servers"),
        ("get secret specdec-api-key --namespace specdec", {"data": {"key": "eA=="}}, "the API key's Secret is there"),
        ("get resourceslices.resource.k8s.io", {"items": []}, "a node offers enough Neuron devices"),
    ],
)
def test_what_is_missing_is_named(call: str, answer: Any, question: str) -> None:
    ready = answers("ready")
    found = list(cluster.findings(changed(), lambda *a: answer if " ".join(a) == call else ready(*a)))
    assert [f.question for f in found if not f.held] == [question]


def test_a_job_of_this_version_is_named(out: Path) -> None:
    name = next(m["metadata"]["name"] for m in manifests(out) if m["kind"] == "Job")
    there = {"items": [{"metadata": {"name": name}}]}
    ready = answers("ready")
    found = cluster.findings(changed(), lambda *a: there if a[1:2] == ("jobs",) else ready(*a))
    assert next(f.detail for f in found if not f.held).startswith(name)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo 'Unable to connect to the server: refused' >&2; exit 1", "Unable to connect"),
        ("echo not json", "printed no JSON"),
        (None, "kubectl is not on this machine"),
    ],
    ids=["down", "garbage", "absent"],
)
def test_a_cluster_that_does_not_answer_is_one_sentence(
    script: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    with pytest.raises(UserError, match=sentence):
        cluster.main(SET)


def test_the_command_prints_a_line_a_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster.findings, "__defaults__", (answers("empty"),))
    with pytest.raises(SystemExit):
        cluster.main(SET)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("MISSING") for line in lines) == 8
    assert sum(line.startswith("by hand") for line in lines) == 4
