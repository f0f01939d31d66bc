"""`python -m deploy.check --values V`: what a cluster lacks, read through kubectl before anything is applied (seconds).

Only reads. What kubectl cannot see (roles, their associations, the bucket) is printed as a list to check by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.checks import INSTANCES
from deploy.claims import DRIVER
from deploy.iam import BENCH, COMPILE, SERVE, account
from deploy.router import PICKER_PORT, POOL, ROUTE
from deploy.values import Values, load_values
from model.errors import UserError, run_cli

# a kubectl call by its arguments after `kubectl`; None where the server has no such object
Kubectl = Callable[..., Any]
_TIMEOUT_SECONDS = 30
_CSI = "s3.csi.aws.com"


@dataclass(frozen=True)
class Finding:
    """One question, whether the cluster answers it well, and what to do if not."""

    question: str
    held: bool
    detail: str


def kubectl(*arguments: str) -> Any:
    """The JSON answer of a kubectl call; UserError where there is no kubectl or no cluster."""
    command = ["kubectl", *arguments, "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except FileNotFoundError as error:
        raise UserError("kubectl is not on this machine; install it and point it at the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"kubectl {arguments[0]} gave no answer in {_TIMEOUT_SECONDS} s; check the cluster") from error
    if done.returncode:
        if "NotFound" in done.stderr or "doesn't have a resource type" in done.stderr:
            return None
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"kubectl {' '.join(arguments)} failed ({reason}); check the context and your rights")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise UserError(f"kubectl {arguments[0]} printed no JSON; use a current kubectl") from error


def findings(values: Values, ask: Kubectl = kubectl) -> Iterator[Finding]:
    """Every question in the order of work."""
    yield _version(values, ask("version"))
    classes = ask("get", "deviceclasses.resource.k8s.io", DRIVER)
    yield Finding(
        "the Neuron DRA driver is installed",
        classes is not None,
        f"DeviceClass {DRIVER}; install the driver's Helm chart",
    )
    yield _devices(values, ask("get", "resourceslices.resource.k8s.io"))
    yield _nodes(values, ask("get", "nodes"))
    yield Finding(
        "the S3 CSI driver is installed",
        ask("get", "csidrivers.storage.k8s.io", _CSI) is not None,
        f"CSIDriver {_CSI}; install the add-on aws-mountpoint-s3-csi-driver",
    )
    agent = ask("get", "daemonset", "eks-pod-identity-agent", "--namespace", "kube-system")
    yield Finding("EKS Pod Identity runs", agent is not None, "add-on eks-pod-identity-agent in kube-system")
    yield _network(ask("get", "daemonset", "aws-node", "--namespace", "kube-system"))
    secret = ask("get", "secret", values.server.api_key_secret, "--namespace", values.namespace)
    held = "api-key" in ((secret or {}).get("data") or {})
    yield Finding(
        "the API key's Secret is there",
        held,
        f"kubectl create secret generic {values.server.api_key_secret} --namespace {values.namespace} "
        "--from-file=api-key=FILE, after the namespace",
    )
    yield _old_jobs(values, ask("get", "jobs", "--namespace", values.namespace))
    if values.router.kind == "gateway":
        yield from _router(values, ask)


def _router(values: Values, ask: Kubectl) -> Iterator[Finding]:
    """Whether the cluster has what the rendered pool and route refer to: their kinds, the Gateway and the picker."""
    definition = "customresourcedefinitions.apiextensions.k8s.io"
    for kind, name in ((POOL, "inferencepools"), (ROUTE, "httproutes")):
        versions = ((ask("get", definition, f"{name}.{kind}") or {}).get("spec") or {}).get("versions") or []
        held = any(v.get("name") == "v1" and v.get("served") for v in versions)
        yield Finding(f"{name} are known in v1", held, f"CustomResourceDefinition {name}.{kind}; install it")
    router = values.router
    gateway = ask("get", f"gateways.{ROUTE}", router.gateway, "--namespace", router.gateway_namespace)
    yield Finding(
        "the router's Gateway is there",
        gateway is not None,
        f"Gateway {router.gateway} in {router.gateway_namespace}; make it, or set router.gateway",
    )
    service = ask("get", "service", router.picker, "--namespace", values.namespace)
    ports = [port.get("port") for port in ((service or {}).get("spec") or {}).get("ports") or []]
    yield Finding(
        "the endpoint picker's Service is there",
        PICKER_PORT in ports,
        f"Service {router.picker} in {values.namespace}, port {PICKER_PORT}; install the picker, or set router.picker",
    )


def _version(values: Values, answer: Any) -> Finding:
    server = (answer or {}).get("serverVersion") or {}
    wanted = tuple(map(int, values.kubernetes.split(".")[:2]))
    try:
        found = int(server["major"]), int(server["minor"].rstrip("+"))
    except (KeyError, ValueError):
        return Finding("the control plane answers", False, "kubectl version names no server")
    text = f"the control plane is {found[0]}.{found[1]}, the values say {values.kubernetes}"
    return Finding("the manifests fit the control plane", found >= wanted, f"{text}; set kubernetes and claim_api")


def _items(answer: Any) -> list[dict[str, Any]]:
    return (answer or {}).get("items") or []


def _devices(values: Values, answer: Any) -> Finding:
    pools: dict[str, int] = {}
    for item in _items(answer):
        spec = item.get("spec", {})
        if spec.get("driver") == DRIVER:
            node = spec.get("nodeName", "?")
            pools[node] = pools.get(node, 0) + len(spec.get("devices") or [])
    most = max(pools.values(), default=0)
    detail = f"{most} of {values.devices} devices on the best node; add a {values.device.instance_type} node"
    return Finding("a node offers enough Neuron devices", most >= values.devices, detail)


def _nodes(values: Values, answer: Any) -> Finding:
    label = "node.kubernetes.io/instance-type"
    kinds = [n["metadata"].get("labels", {}).get(label) for n in _items(answer)]
    count = kinds.count(values.device.instance_type)
    # two servers, baseline and speculative
    wanted = 2 * values.server.replicas * values.devices / INSTANCES[values.device.instance_type]
    return Finding(
        "there are nodes for both servers",
        count >= wanted,
        f"{count} nodes of type {values.device.instance_type}, {wanted:g} needed for both at once; "
        "add nodes, or let Karpenter make them",
    )


def _network(answer: Any) -> Finding:
    template = (answer or {}).get("spec", {}).get("template", {}).get("spec", {})
    arguments = [a for c in template.get("containers", []) for a in c.get("args") or []]
    held = "--enable-network-policy=true" in arguments
    return Finding("NetworkPolicies are enforced", held, "set enableNetworkPolicy in the add-on vpc-cni")


def _old_jobs(values: Values, answer: Any) -> Finding:
    names = {item["metadata"]["name"] for item in _items(answer)}
    parts = ("compile-baseline", "compile-speculative", "load-test", "quality")
    there = sorted(names & {f"{values.name}-{part}-{values.version}" for part in parts})
    return Finding(
        "no Job of this version was run before",
        not there,
        f"{', '.join(there)}: a Job cannot be changed; delete it to run it again",
    )


def by_hand(values: Values) -> list[str]:
    """What kubectl cannot see."""
    accounts = ", ".join(account(values, role) for role in (COMPILE, BENCH))
    return [
        f"the bucket {values.storage.bucket} is yours, in {values.region}, and blocks public access",
        f"roles with the policies of iam/ are associated (EKS Pod Identity) with {accounts} in {values.namespace}, "
        f"and none with {account(values, SERVE)}",
        "the S3 CSI driver's account s3-csi-driver-sa in kube-system has a role with iam/bucket-read.json",
        "if the bucket is encrypted with a KMS key, all three roles may use it (kms:Decrypt; compile and bench also "
        "kms:GenerateDataKey)",
    ]


def main(arguments: list[str]) -> None:
    """A line a question on stdout; exit code 1 if one is not held."""
    parser = argparse.ArgumentParser(prog="python -m deploy.check", description=__doc__)
    parser.add_argument("--values", type=Path, default=Path(__file__).with_name("values.yaml"), help="values file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value")
    options = parser.parse_args(arguments)
    values = load_values(options.values, options.set)
    answers = list(findings(values))
    for answer in answers:
        print(f"ok       {answer.question}" if answer.held else f"MISSING  {answer.question}: {answer.detail}")
    for line in by_hand(values):
        print(f"by hand  {line}")
    if not all(answer.held for answer in answers):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
