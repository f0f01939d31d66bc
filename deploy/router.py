"""Replicas behind an existing router: the Gateway API's inference extension picks the server for each request.

The InferencePool is the speculative servers, the HTTPRoute sends a Gateway's traffic to it. Gateway and endpoint picker
are the cluster's own: a picker installed by llm-d-router's chart under the release NAME is the Service NAME-epp, whose
pods have the label llm-d-router-gateway=NAME-epp. A picker reads the pods' readiness and vLLM's metrics
num_requests_waiting and kv_cache_usage_perc; for a bundle the second is the share of its slots that are taken.

Sources: inference.networking.k8s.io/v1 as of v1.6.0, gateway.networking.k8s.io/v1 as of v1.6.1.
"""

from __future__ import annotations

from deploy.pods import Manifest, labels, metadata
from deploy.values import Values

POOL, ROUTE = "inference.networking.k8s.io", "gateway.networking.k8s.io"
# what an endpoint picker's Service listens on
PICKER_PORT = 9002
KINDS = ("InferencePool", "HTTPRoute")
SERVED = "speculative"


def objects(values: Values) -> list[Manifest]:
    """The pool and the route; nothing where no router is asked for."""
    return [_pool(values), _route(values)] if values.router.kind == "gateway" else []


def _pool(values: Values) -> Manifest:
    return {
        "apiVersion": f"{POOL}/v1",
        "kind": "InferencePool",
        "metadata": metadata(values, values.server_name(SERVED), SERVED),
        "spec": {
            "selector": {"matchLabels": labels(values, SERVED)},
            "targetPorts": [{"number": values.server.port}],
            # without a picker a server would be chosen blindly: rather none
            "endpointPickerRef": {
                "name": values.router.picker,
                "port": {"number": PICKER_PORT},
                "failureMode": "FailClose",
            },
        },
    }


def _route(values: Values) -> Manifest:
    gateway = {
        "group": ROUTE,
        "kind": "Gateway",
        "name": values.router.gateway,
        "namespace": values.router.gateway_namespace,
    }
    pool = {"group": POOL, "kind": "InferencePool", "name": values.server_name(SERVED)}
    paths = [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    # an answer streams as long as it takes
    rule = {"matches": paths, "backendRefs": [pool], "timeouts": {"request": "0s"}}
    return {
        "apiVersion": f"{ROUTE}/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(values, values.server_name(SERVED), SERVED),
        "spec": {"parentRefs": [gateway], "rules": [rule]},
    }
