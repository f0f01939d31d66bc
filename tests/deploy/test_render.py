"""Every manifest is valid, agrees with the others, and holds what docs/operating.md promises."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from compile.neuron import config as neuron_config
from compile.neuron.flags import LNC
from compile.spec import BuildSpec, Recipe
from compile.spec import parse as parse_build
from compile.store import split
from deploy.render import fill, main, validate
from model.errors import UserError
from tests.deploy.rendered import (
    OURS,
    SET,
    container,
    containers,
    environment,
    every_text,
    flags,
    manifests,
    one,
    pods,
    rendered,
    values_of,
)
from tests.deploy.test_values import DRAFTS, KEY
from trnspec.bundle.signature import VARIABLE

VARIANTS = ("baseline", "speculative")
NGRAM = ("model.drafter=ngram", "model.draft=none", "model.draft_folder=none")
CASES: dict[str, tuple[str, ...]] = {
    "as shipped": (),
    "k 5, tp 64": ("model.k=5", "model.tp=64", "kubernetes=1.37"),
    "k 3, tp 4, batch 1": ("model.k=3", "model.tp=4", "model.batch=1", "model.max_len=2048"),
    "small draft": ("model.draft=Qwen/Qwen3-0.6B", "model.draft_folder=hub/0.6B", "storage.prefix=a/b"),
    "our engine, behind a router": (*OURS, "router.kind=gateway", "server.port=9000", "server.replicas=3"),
    "n-gram drafts": (*OURS, *NGRAM),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    changes = CASES[request.param]
    return values_of(*changes), rendered(tmp_path_factory.mktemp("out") / "manifests", *changes, validated=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(tmp_path_factory.mktemp("shipped") / "manifests")


def test_every_case_renders_whole(case: tuple[Any, Path]) -> None:
    """The renderer has validated each manifest against the strict schema of its version."""
    values, out = case
    assert len(manifests(out)) == (23 if values["router"]["kind"] == "gateway" else 20)
    assert "${" not in every_text(out)


def wrong(manifest: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    spoiled = copy.deepcopy(manifest)
    at: Any = spoiled
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return spoiled


def test_the_schema_refuses_an_unknown_field_a_wrong_type_and_a_version_without_the_kind(out: Path) -> None:
    claim, server = one(out, "ResourceClaimTemplate"), one(out, "Deployment", "speculative")
    devices = ("spec", "spec", "devices")
    for spoiled in (
        wrong(claim, *devices, "requests", 0, "count", value=8),
        wrong(claim, *devices, "config", 0, "opaque", "param", value={}),
        wrong(server, "spec", "template", "spec", "containers", 0, "command", value="vllm serve"),
        wrong(server, "spec", "replica", value=1),
    ):
        with pytest.raises(UserError, match="does not fit Kubernetes"):
            validate(spoiled, "1.34")
    for version, said in (("1.30", "has no resource.k8s.io/v1"), ("1.20", "no schemas"), ("1.99", "no schemas")):
        with pytest.raises(UserError, match=said):
            validate(claim, version)


def test_filling_replaces_values_and_never_reads_them_as_yaml() -> None:
    scope = {"port": 80, "name": "${port}", "list": ["a", "b"], "part": {"image": "x", "env": 1}, "of": {"it": "y"}}
    template = {"<<": "${part}", "env": 2, "${of.it}": "${port}", "text": "p-${port}", "n": ["${list}", "c", "${name}"]}
    filled = {"image": "x", "env": 2, "y": 80, "text": "p-80", "n": ["a", "b", "c", "${port}"]}
    assert fill(template, scope) == filled
    with pytest.raises(KeyError):
        fill("${unknown}", scope)


def asked(out: Path, variant: str) -> BuildSpec:
    """What the compile Job asks compile.build for."""
    return parse_build(container(out, f"compile-{variant}", "build")["command"][3:])


def here(build: BuildSpec) -> BuildSpec:
    """The same of presets, where the bucket is not mounted."""
    return dataclasses.replace(build, target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-1.7B")


@pytest.mark.parametrize("variant", VARIANTS)
def test_k_tp_batch_and_length_agree_everywhere(case: tuple[Any, Path], variant: str) -> None:
    values, out = case
    m, k = values["model"], values["model"]["k"] if variant == "speculative" else 0
    build = asked(out, variant)
    here(build).check()
    shape = (build.tp, build.batch, build.max_len, build.k, build.dtype, build.recipe)
    assert shape == (m["tp"], m["batch"], m["max_len"], str(k), m["dtype"], Recipe(toolchain="neuron"))
    expected = {"tp": m["tp"], "batch": m["batch"], "max-len": m["max_len"], "k": k, "lnc": LNC}
    for owner, name in ((f"compile-{variant}", "push"), (f"-{variant}", "fetch")):
        found = flags(container(out, owner, name)["command"])
        assert {n: int(found[n]) for n in expected} == expected
        assert found["drafter"] == (m["drafter"] if k else "none")
    devices = one(out, "ResourceClaimTemplate")["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"]["count"] * 8 == m["tp"] * LNC
    assert devices["config"][0]["opaque"]["parameters"]["logicalNeuronCore"] == LNC


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_vendors_engine_is_asked_for_what_the_bundle_was_built_for(out: Path, variant: str) -> None:
    """num_speculative_tokens becomes NxDI's speculation_length as it is, and that counts the verified rows."""
    build = asked(out, variant)
    built = json.loads(neuron_config.render(here(build).bundle))["neuron_config"]
    server = container(out, f"-{variant}", "server")
    served = flags(server["command"])
    drafts = json.loads(served.get("speculative-config", '{"num_speculative_tokens": 0}'))
    fused = json.loads(served["override-neuron-config"]).get("enable_fused_speculation", False)
    assert (built["speculation_length"], built["enable_fused_speculation"]) == (drafts["num_speculative_tokens"], fused)
    # both end their sequences at the same length, the draft's too
    lengths = {int(served["max-model-len"]), drafts.get("max_model_len", 1017)}
    assert lengths == {1017}
    assert environment(server)["NEURON_LOGICAL_NC_CONFIG"] == str(LNC)
    assert environment(server)["VLLM_USE_V1"] == "0"
    if variant == "speculative":
        assert (drafts["num_speculative_tokens"], drafts["model"]) == (8, build.draft)
        assert "method" not in drafts


def test_paths_agree_from_the_compile_job_to_the_server(case: tuple[Any, Path]) -> None:
    values, out = case
    csi = one(out, "PersistentVolume")["spec"]
    assert f"prefix={values['storage']['prefix']}/" in csi["mountOptions"]
    root = f"s3://{csi['csi']['volumeAttributes']['bucketName']}/{values['storage']['prefix']}"
    folders = set()
    for variant in VARIANTS:
        build = asked(out, variant)
        pushed_from, pushed_to = container(out, f"compile-{variant}", "push")["command"][4:6]
        stored, local = container(out, f"-{variant}", "fetch")["command"][4:6]
        server = container(out, f"-{variant}", "server")
        mounts = {m["name"]: m for m in server["volumeMounts"]}
        assert build.out == pushed_from
        assert pushed_to == root + stored.removeprefix("/mnt/bucket")
        assert split(pushed_to)[1] == split(local)[1] == split(pushed_from)[1]
        assert (mounts["bundle"]["mountPath"], mounts["bundle"]["readOnly"]) == ("/bundle", True)
        if values["server"]["engine"] == "nxdi":
            assert environment(server)["NEURON_COMPILED_ARTIFACTS"] == local
            assert server["command"][2] == build.target == f"/mnt/bucket/{values['model']['target_folder']}"
        else:
            assert server["command"][:3] == ["vllm", "serve", local]
        folders.add(local)
    assert len(folders) == 2


def test_the_servers_differ_in_speculation_only(out: Path) -> None:
    servers = {v: container(out, f"-{v}", "server") for v in VARIANTS}
    own = {"speculative-config", "override-neuron-config"}
    asked = [{n: v for n, v in flags(s.pop("command")).items() if n not in own} for s in servers.values()]
    assert asked[0] == asked[1]
    variables = [environment(s) for s in servers.values()]
    assert {n for n in variables[0] if variables[0][n] != variables[1][n]} == {"NEURON_COMPILED_ARTIFACTS"}
    assert {k: v for k, v in servers["baseline"].items() if k != "env"} == {
        k: v for k, v in servers["speculative"].items() if k != "env"
    }


def test_the_compile_jobs_differ_in_the_draft_only(out: Path) -> None:
    asked = {v: flags(container(out, f"compile-{v}", "build")["command"]) for v in VARIANTS}
    assert set(asked["speculative"]) - set(asked["baseline"]) == {"drafter", "draft"}
    assert {n for n in asked["baseline"] if asked["baseline"][n] != asked["speculative"][n]} == {"k", "out"}


@pytest.mark.parametrize("drafter", DRAFTS)
def test_the_build_gets_the_draft_that_its_drafter_needs(drafter: str, tmp_path: Path) -> None:
    folder = "none" if drafter == "ngram" else "heads"
    model = (f"model.drafter={drafter}", f"model.draft={DRAFTS[drafter]}", f"model.draft_folder={folder}")
    built = flags(container(rendered(tmp_path, *OURS, *model), "compile-speculative", "build")["command"])
    draft = {} if drafter == "ngram" else {"draft": "/mnt/bucket/heads"}
    assert {n: v for n, v in built.items() if n.startswith("draft")} == {"drafter": drafter} | draft
    checked = container(tmp_path, "compile-speculative", "check")["command"][3:]
    own = f"{DRAFTS['chain'] if drafter == 'chain' else drafter}=/mnt/bucket/heads"
    assert checked == ["Qwen/Qwen3-32B=/mnt/bucket/checkpoints/Qwen3-32B", *([own] if draft else [])]


def test_every_name_that_is_used_is_made_here(case: tuple[Any, Path]) -> None:
    values, out = case
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests(out)}
    assert len(made) == len(manifests(out))
    for owner, spec in pods(out):
        assert ("ServiceAccount", spec["serviceAccountName"]) in made, owner
        for claim in spec.get("resourceClaims", []):
            assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in made
        volumes = {v["name"]: v for v in spec["volumes"]}
        for found in containers(spec):
            assert {m["name"] for m in found["volumeMounts"]} <= volumes.keys(), found["name"]
            assert found["resources"]["requests"] == found["resources"]["limits"]
            assert found["command"][0] in ("python", "vllm", "lm_eval"), "no shell before a process"
        disk = [
            v["emptyDir"]["sizeLimit"] for v in volumes.values() if "medium" not in v.get("emptyDir", {"medium": 1})
        ]
        limits = [c["resources"]["limits"]["ephemeral-storage"] for c in spec["containers"]]
        assert sum(int(d[:-2]) for d in disk) <= sum(int(limit[:-2]) for limit in limits), owner
    volume, claim = one(out, "PersistentVolume"), one(out, "PersistentVolumeClaim")
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == volume["spec"]["csi"]["volumeHandle"]
    assert all(
        m["metadata"].get("namespace") == values["namespace"] for m in manifests(out) if m["kind"] not in CLUSTER
    )
    evaluated = container(out, "evaluate", "load-speculative")["command"]
    service = one(out, "Service", "speculative")
    url = f"http://{service['metadata']['name']}.specdec.svc.cluster.local:{service['spec']['ports'][0]['port']}"
    assert flags(evaluated)["base-url"] == url


CLUSTER = ("Namespace", "PersistentVolume")


def test_no_account_id_placeholder_or_credential_is_rendered(case: tuple[Any, Path]) -> None:
    text = every_text(case[1])
    assert not re.search(r"(?<!\d)\d{12}(?!\d)", text)
    assert not re.search(r"your-|changeme|<[^>\n]+>|\bTODO\b|AKIA|ACCESS_KEY|SESSION_TOKEN|PASSWORD|eagle", text, re.I)
    assert not [m for m in manifests(case[1]) if m["kind"] == "Secret"]


def test_containers_have_no_rights_and_only_the_vendors_server_is_root(case: tuple[Any, Path]) -> None:
    values, out = case
    roots = []
    for owner, spec in pods(out):
        assert spec["automountServiceAccountToken"] is False
        for found in containers(spec):
            context = found["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            if not (context.get("runAsNonRoot") and context["readOnlyRootFilesystem"]):
                roots.append((owner, found["name"]))
    assert roots == ([("Deployment", "server")] * 2 if values["server"]["engine"] == "nxdi" else [])
    assert one(out, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"


@pytest.mark.parametrize("engine", [(), OURS], ids=["nxdi", "trnspec"])
def test_servers_verify_with_the_public_key_where_one_is_given(engine: tuple[str, ...], tmp_path: Path) -> None:
    keys = {"no key": rendered(tmp_path / "a", *engine), "key": rendered(tmp_path / "b", *engine, f"public_key={KEY}")}
    assert VARIABLE not in every_text(keys["no key"]), "an empty variable would ask for no signature"
    holders = {c["name"] for _, s in pods(keys["key"]) for c in containers(s) if environment(c).get(VARIABLE) == KEY}
    assert holders == {"fetch", "server"}


def test_the_api_key_comes_from_the_operators_secret(out: Path) -> None:
    wanted = {"secretKeyRef": {"name": "specdec-api-key", "key": "api-key"}}
    named = [c for _, spec in pods(out) for c in containers(spec)]
    keyed = {c["name"]: (e["name"], e["valueFrom"]) for c in named for e in c["env"] if "valueFrom" in e}
    clients = {f"{part}-{v}": ("OPENAI_API_KEY", wanted) for part in ("answers", "load") for v in VARIANTS}
    assert keyed == clients | {"server": ("VLLM_API_KEY", wanted)}


def test_a_server_leaves_the_routers_then_drains_then_ends(tmp_path: Path) -> None:
    for variant in VARIANTS:
        deployment = one(rendered(tmp_path, *OURS), "Deployment", variant)["spec"]
        spec = deployment["template"]["spec"]
        (server,) = spec["containers"]
        leave, drain = server["lifecycle"]["preStop"]["sleep"]["seconds"], flags(server["command"])["shutdown-timeout"]
        assert spec["terminationGracePeriodSeconds"] > leave + int(drain)
        assert {server[p]["httpGet"]["path"] for p in ("startupProbe", "readinessProbe")} == {"/health"}
        assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] == 1800
        # a new pod never waits for the devices of the one that it replaces
        assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        assert "podAntiAffinity" in spec["affinity"]
        assert one(tmp_path, "PodDisruptionBudget", variant)["spec"]["maxUnavailable"] == 1


def test_the_network_denies_everything_except_the_listed_rules(case: tuple[Any, Path]) -> None:
    values, out = case
    rules = {m["metadata"]["name"].removeprefix("qwen3-specdec-"): m["spec"] for m in manifests(out)
             if m["kind"] == "NetworkPolicy"}  # fmt: skip
    routed = values["router"]["kind"] == "gateway"
    assert rules.keys() == {"deny-all", "servers", "evaluate", "compile", *(["picker"] if routed else [])}
    assert rules["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert rules["servers"]["policyTypes"] == ["Ingress"], "a server calls nobody"
    assert rules["evaluate"]["policyTypes"] == rules["compile"]["policyTypes"] == ["Egress"], "nobody calls a Job"
    (ingress,) = rules["servers"]["ingress"]
    assert len(ingress["from"]) == (5 if routed else 3)
    assert ingress["ports"] == [{"protocol": "TCP", "port": values["server"]["port"]}]
    key = "app.kubernetes.io/component"
    parts = {m["spec"]["template"]["metadata"]["labels"][key] for m in manifests(out) if m["kind"] in WORK}
    assert parts == {*rules["servers"]["podSelector"]["matchExpressions"][0]["values"], "evaluate", "compile"}


WORK = ("Deployment", "Job")


def test_the_pool_is_the_speculative_replicas_and_the_route_leads_to_it(tmp_path: Path) -> None:
    changes = ("router.kind=gateway", "router.gateway=front", "router.gateway_namespace=edge", "router.picker=my-epp")
    out = rendered(tmp_path, *OURS, *changes)
    pool, route, deployment = (one(out, kind, part) for kind, part in (
        ("InferencePool", ""), ("HTTPRoute", ""), ("Deployment", "-speculative")))  # fmt: skip
    assert pool["spec"]["selector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "my-epp", "port": {"number": 9002}, "failureMode": "FailClose"}
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"]) == ("front", "edge")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    callers = one(out, "NetworkPolicy", "servers")["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": {"llm-d-router-gateway": "my-epp"}}} in callers
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}} in callers


def test_policies_are_small_and_a_manifest_is_never_replaced(out: Path) -> None:
    policies = {file.stem: json.loads(file.read_text())["Statement"] for file in out.glob("iam/*.json")}
    assert policies.keys() == {"trust", "bucket-read", "compile", "evaluate"}
    allowed = [s for name, statements in policies.items() if name != "trust" for s in statements]
    assert all(s["Resource"].startswith("arn:aws:s3:::specdec-artifacts") for s in allowed)
    assert not [action for s in allowed for action in s["Action"] if "*" in action or "Delete" in action]
    assert [s for s in policies["compile"] if s["Effect"] == "Deny"] == [
        {
            "Effect": "Deny",
            "Action": ["s3:PutObject"],
            "Resource": "arn:aws:s3:::specdec-artifacts/team/bundles/*/manifest.json",
            "Condition": {"Null": {"s3:if-none-match": "true"}},
        }
    ]


def test_the_partition_follows_the_region(tmp_path: Path) -> None:
    for region, partition in (("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn"), ("eu-central-1", "aws")):
        assert f"arn:{partition}:s3" in (rendered(tmp_path, f"region={region}") / "iam/compile.json").read_text()


def test_prometheus_reaches_the_servers_and_finds_their_metrics(tmp_path: Path) -> None:
    out = rendered(tmp_path, "server.prometheus_namespace=observed")
    callers = one(out, "NetworkPolicy", "servers")["spec"]["ingress"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observed"}}} in callers
    for variant in VARIANTS:
        notes = one(out, "Service", f"-{variant}")["metadata"]["annotations"]
        assert notes == {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics"}


# a name of V0 and one of V1 for the same figure; tests/serve/test_http.py asks a server for all names of trnspec
ENGINES = {
    "nxdi": ((), 6, "vllm:time_per_output_token_seconds_bucket"),
    "trnspec": (OURS, 10, "vllm:request_time_per_output_token_seconds_bucket"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_dashboard_asks_for_both_servers_and_for_what_the_engine_has(tmp_path: Path, engine: str) -> None:
    changes, count, time_per_token = ENGINES[engine]
    board = json.loads((rendered(tmp_path, *changes) / "grafana/dashboard.json").read_text(encoding="utf-8"))
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}) == count
    asked = " ".join(panel["targets"][0]["expr"] for panel in board["panels"])
    assert f"({time_per_token}" in asked
    assert ("trnspec_tokens_total" in asked) == (engine == "trnspec")
    assert "spec_decode" not in asked, "V0 does not count fused drafts, V1 counts those that a stop cuts"
    for panel in board["panels"]:
        (target,) = panel["targets"]
        assert 'service=~"qwen3-specdec-(baseline|speculative)"' in target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_the_command_renders_replaces_and_spares_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main([*SET, "--out", str(out)])
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    first = every_text(out)
    (out / "jobs/old.yaml").write_text("kind: Old\n", encoding="utf-8")
    main([*SET, "--out", str(out)])
    assert every_text(out) == first
    (tmp_path / "mine/base").mkdir(parents=True)
    (tmp_path / "mine/base/namespace.yaml").write_text("x", encoding="utf-8")
    for path, said in ((tmp_path / "mine", "not rendered manifests"), (out / "iam/trust.json", "is a file")):
        with pytest.raises(UserError, match=said):
            main([*SET, "--out", str(path)])
    assert (tmp_path / "mine/base/namespace.yaml").is_file()
