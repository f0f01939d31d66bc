"""Who may talk to whom: nothing but what is listed, for every pod of the namespace.

They hold only where the cluster's network plug-in enforces them: on EKS the VPC CNI with its policy agent switched on.
"""

from __future__ import annotations

from typing import Any

from deploy.pods import Manifest, labels, metadata
from deploy.router import PICKER_PORT
from deploy.values import Values

# EKS Pod Identity's agent on each node: https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html
_IDENTITY_AGENT = {"to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}], "ports": [{"protocol": "TCP", "port": 80}]}
_DNS = {
    "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}
# S3, STS and CloudWatch have no fixed addresses
_HTTPS = {"ports": [{"protocol": "TCP", "port": 443}]}
_CLIENTS = ("load-test", "quality")
_COMPILERS = ("compile-baseline", "compile-speculative")


def policies(values: Values) -> list[Manifest]:
    """Deny all; then callers to servers, and the Jobs to what they need. A server calls nobody."""
    port = {"protocol": "TCP", "port": values.server.port}
    namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": values.server.clients_namespace}}}
    callers = [namespace, *({"podSelector": {"matchLabels": labels(values, part)}} for part in _CLIENTS)]
    servers = [{"podSelector": {"matchLabels": labels(values, part)}} for part in ("baseline", "speculative")]
    if values.router.kind == "gateway":
        gateways = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": values.router.gateway_namespace}}
        }
        picker = {"podSelector": {"matchLabels": _picker(values)}}
        callers += [gateways, picker]
    rules = [_policy(values, "deny-all", {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})]
    for variant in ("baseline", "speculative"):
        rules.append(_for(values, variant, ingress=[{"from": callers, "ports": [port]}]))
    for part in _CLIENTS:
        rules.append(_for(values, part, egress=[{"to": servers, "ports": [port]}, _DNS, _HTTPS, _IDENTITY_AGENT]))
    for part in _COMPILERS:
        rules.append(_for(values, part, egress=[_DNS, _HTTPS, _IDENTITY_AGENT]))
    if values.router.kind == "gateway":
        rules.append(_picker_policy(values, gateways, {"to": servers, "ports": [port]}))
    return rules


def _picker(values: Values) -> dict[str, str]:
    return {values.router.picker_label: values.router.picker}


def _picker_policy(values: Values, gateways: Manifest, to_servers: Manifest) -> Manifest:
    """The endpoint picker is asked by gateways, asks the servers for metrics and the control plane for pods."""
    asked = {"from": [gateways], "ports": [{"protocol": "TCP", "port": PICKER_PORT}]}
    selector = {"matchLabels": _picker(values)}
    spec = {
        "podSelector": selector,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [asked],
        "egress": [to_servers, _DNS, _HTTPS],
    }
    return _policy(values, "picker", spec)


def _for(values: Values, part: str, **allowed: list[Any]) -> Manifest:
    kinds = [name.capitalize() for name in allowed]
    selector = {"matchLabels": labels(values, part)}
    return _policy(values, part, {"podSelector": selector, "policyTypes": kinds, **allowed})


def _policy(values: Values, part: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(values, f"{values.name}-{part}", part),
        "spec": spec,
    }
