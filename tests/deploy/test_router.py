"""Replicas behind a router: the objects fit the published schemas, name what is there, and the network lets them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deploy import check as cluster
from deploy.render import render
from model.errors import UserError
from tests.deploy.rendered import Manifest, changed, containers, manifests, one, pods
from tests.deploy.test_engine import TRNSPEC
from tests.deploy.test_operator import answers

_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_GROUP = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_KIND = r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _text(pattern: str = "", longest: int = 253, least: int = 1) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": longest} | ({"pattern": pattern} if pattern else {})


_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_NUMBER = _object(["number"], number=_PORT)
_LABEL = _text(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", 63, 0)
_REFERENCE = {"group": _text(_GROUP, least=0), "kind": _text(_KIND, 63), "name": _text()}
# the fields that we use, as inference.networking.k8s.io v1 of bundle v1.6.0 and gateway.networking.k8s.io v1 of bundle
# v1.6.1 (standard channel) describe them; v1.0.0 of the first also requires endpointPickerRef
SCHEMAS = {
    "InferencePool": _object(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=_object(
            ["matchLabels"],
            matchLabels={"type": "object", "minProperties": 1, "maxProperties": 64, "additionalProperties": _LABEL},
        ),
        # v1.0.0 takes one, later versions eight
        targetPorts={"type": "array", "minItems": 1, "maxItems": 1, "items": _NUMBER},
        # a rule asks for the port where the kind is Service, its default
        endpointPickerRef=_object(
            ["name", "port"], **_REFERENCE, port=_NUMBER, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
    "HTTPRoute": _object(
        [],
        parentRefs={
            "type": "array",
            "maxItems": 32,
            "items": _object(["name"], **_REFERENCE, namespace=_text(_NAME, 63)),
        },
        rules={
            "type": "array",
            "minItems": 1,
            "maxItems": 16,
            "items": _object(
                [],
                matches={
                    "type": "array",
                    "items": _object(
                        [],
                        path=_object(
                            [],
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value=_text("^/", 1024),
                        ),
                    ),
                },
                backendRefs={"type": "array", "maxItems": 16, "items": _object(["name"], **_REFERENCE)},
                timeouts=_object([], request=_text(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")),
            ),
        },
    ),
}
VERSIONS = {"InferencePool": "inference.networking.k8s.io/v1", "HTTPRoute": "gateway.networking.k8s.io/v1"}
ROUTED: dict[str, Any] = TRNSPEC | {
    "server": {"engine": "trnspec", "replicas": 3},
    "router": {"kind": "gateway", "gateway": "front", "gateway_namespace": "edge", "picker": "pool-epp"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    render(changed(**ROUTED), folder)
    return folder


def check(manifest: Manifest) -> None:
    assert manifest["apiVersion"] == VERSIONS[manifest["kind"]]
    jsonschema.validate(manifest["spec"], SCHEMAS[manifest["kind"]])


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_object_fits_its_schema(out: Path, kind: str) -> None:
    check(one(out, kind))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("InferencePool", ("endpointPickerRef",), {"name": "a"}),
        ("InferencePool", ("extensionRef",), {"name": "a"}),
        ("InferencePool", ("targetPortNumber",), 8000),
        ("InferencePool", ("selector",), {"app": "a"}),
        ("InferencePool", ("targetPorts", 0, "number"), "8000"),
        ("HTTPRoute", ("rules", 0, "timeouts", "request"), "forever"),
        ("HTTPRoute", ("rules", 0, "backendRefs", 0, "name"), ""),
        ("HTTPRoute", ("rules", 0, "matches", 0, "path", "type"), "Prefix"),
    ],
)
def test_the_schema_refuses_what_the_published_one_refuses(
    out: Path, kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    manifest = copy.deepcopy(one(out, kind))
    at: Any = manifest["spec"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_the_pool_is_the_replicas_and_the_route_leads_to_it(out: Path) -> None:
    pool, route = one(out, "InferencePool"), one(out, "HTTPRoute")
    deployment = one(out, "Deployment", "speculative")
    assert deployment["spec"]["replicas"] == 3
    template = deployment["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    others = [m for m in manifests(out) if m["kind"] == "Deployment" and m is not deployment]
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in others if m["metadata"] != deployment["metadata"]]
    assert labels
    assert not [found for found in labels if pool["spec"]["selector"]["matchLabels"].items() <= found.items()]
    (server,) = [c for c in containers(template["spec"]) if c["name"] == "server"]
    assert pool["spec"]["targetPorts"] == [{"number": server["ports"][0]["containerPort"]}]
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"]) == ("front", "edge")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"]) == ("inference.networking.k8s.io", "InferencePool")
    assert backend["name"] == pool["metadata"]["name"]
    # no namespace: the route's own
    assert route["metadata"]["namespace"] == pool["metadata"]["namespace"] == deployment["metadata"]["namespace"]


def test_gateway_picker_and_servers_may_talk(out: Path) -> None:
    rules = {m["metadata"]["name"]: m["spec"] for m in manifests(out) if m["kind"] == "NetworkPolicy"}
    edge = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}}
    picker = {"podSelector": {"matchLabels": {"llm-d-router-gateway": "pool-epp"}}}
    servers = rules["qwen3-specdec-speculative"]
    assert edge in servers["ingress"][0]["from"]
    assert picker in servers["ingress"][0]["from"]
    assert servers["policyTypes"] == ["Ingress"]
    own = rules["qwen3-specdec-picker"]
    assert own["podSelector"] == picker["podSelector"]
    assert own["ingress"] == [{"from": [edge], "ports": [{"protocol": "TCP", "port": 9002}]}]
    assert {"protocol": "TCP", "port": 8000} in own["egress"][0]["ports"]


def test_replicas_keep_apart_and_change_one_by_one(out: Path) -> None:
    spec = one(out, "Deployment", "speculative")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert one(out, "PodDisruptionBudget", "speculative")["spec"]["maxUnavailable"] == 1
    assert all(
        "podAntiAffinity" in s["affinity"] for name, s in pods(out) if name.endswith("-speculative") and "affinity" in s
    )


def test_without_a_router_none_is_rendered(tmp_path: Path) -> None:
    render(changed(**TRNSPEC), tmp_path)
    assert not {m["kind"] for m in manifests(tmp_path)} & SCHEMAS.keys()
    assert "picker" not in (tmp_path / "base/network.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (TRNSPEC | {"router": {"kind": "nginx"}}, "must be none or gateway"),
        ({"router": {"kind": "gateway"}}, "set server.engine to trnspec"),
        (ROUTED | {"router": {"kind": "gateway", "gateway": "A b"}}, "the name of a Gateway"),
        (ROUTED | {"router": {"kind": "gateway", "picker": "your-picker"}}, "looks unfilled"),
        (ROUTED | {"router": {"kind": "gateway", "picker_label": "a b"}}, "a label's key"),
    ],
)
def test_a_router_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        changed(**change)


def routed_answers(*arguments: str) -> Any:
    """kubectl's answers of a cluster that has a router, as far as the check reads them."""
    definition = {"spec": {"versions": [{"name": "v1alpha2", "served": True}, {"name": "v1", "served": True}]}}
    crds = "get customresourcedefinitions.apiextensions.k8s.io"
    return {
        f"{crds} inferencepools.inference.networking.k8s.io": definition,
        f"{crds} httproutes.gateway.networking.k8s.io": definition,
        "get gateways.gateway.networking.k8s.io front --namespace edge": {"kind": "Gateway"},
        "get service pool-epp --namespace specdec": {"spec": {"ports": [{"port": 9002}, {"port": 9090}]}},
    }.get(" ".join(arguments)) or answers("ready")(*arguments)


def lacking(ask: Any, **values: Any) -> list[str]:
    return [f.question for f in cluster.findings(changed(**values), ask) if not f.held]


def test_the_check_asks_for_what_the_route_refers_to() -> None:
    few = {"server": {**ROUTED["server"], "replicas": 1}}
    assert lacking(routed_answers, **ROUTED | few) == []
    assert lacking(answers("ready"), **ROUTED | few) == [
        "inferencepools are known in v1",
        "httproutes are known in v1",
        "the router's Gateway is there",
        "the endpoint picker's Service is there",
    ]
    # without a router nobody asks
    assert lacking(answers("ready")) == []


@pytest.mark.parametrize(
    ("kind", "answer", "question"),
    [
        ("service", {"spec": {"ports": [{"port": 9003}]}}, "the endpoint picker's Service is there"),
        (
            "customresourcedefinitions.apiextensions.k8s.io",
            {"spec": {"versions": [{"name": "v1", "served": False}, {"name": "v1alpha2", "served": True}]}},
            "inferencepools are known in v1",
        ),
    ],
)
def test_the_check_names_a_router_that_does_not_fit(kind: str, answer: Any, question: str) -> None:
    def ask(*arguments: str) -> Any:
        return answer if arguments[1] == kind else routed_answers(*arguments)

    assert question in lacking(ask, **ROUTED)
