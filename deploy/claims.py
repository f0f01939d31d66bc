"""The claim of connected Neuron devices, in both forms of its API.

Source: the Neuron DRA pages of the Neuron SDK documentation (deploy/eks/dra). v1 nests what a
request asks for under `exactly`; v1beta1 holds it flat.
"""

from __future__ import annotations

import json
from typing import Any

from deploy.values import Values

DRIVER = "neuron.aws.com"
_REQUEST = "neurons"


def claim_name(values: Values) -> str:
    return f"{values.name}-{values.devices}-devices"


def claim_template(values: Values) -> dict[str, Any]:
    """A ResourceClaimTemplate for the devices of one server, with its size of a logical core."""
    # a JSON string is a CEL string; the value is one of a list besides
    instance = f"device.attributes['{DRIVER}'].instanceType == {json.dumps(values.device.instance_type)}"
    asked: dict[str, Any] = {
        "deviceClassName": DRIVER,
        "allocationMode": "ExactCount",
        "count": values.devices,
        "selectors": [{"cel": {"expression": instance}}],
    }
    request = {"name": _REQUEST} | ({"exactly": asked} if values.claim_api == "v1" else asked)
    config = {"apiVersion": f"{DRIVER}/v1", "kind": "NeuronConfig", "logicalNeuronCore": values.device.lnc}
    connected = {
        "requests": [_REQUEST],
        "matchAttribute": f"resource.aws.com/devicegroup{values.devices}_id",
    }
    return {
        "apiVersion": f"resource.k8s.io/{values.claim_api}",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": claim_name(values), "namespace": values.namespace},
        "spec": {
            "spec": {
                "devices": {
                    "requests": [request],
                    "constraints": [connected],
                    "config": [{"requests": [_REQUEST], "opaque": {"driver": DRIVER, "parameters": config}}],
                }
            }
        },
    }
