"""What the pods have in common: names, containers without a shell, scratch volumes, whole Jobs."""

from __future__ import annotations

from typing import Any

from deploy.claims import claim_name
from deploy.iam import account
from deploy.values import Values

CLAIM = "neurons"
SCRATCH = "/scratch"
RESULTS = "/results"
# what our own containers need when they only talk
SMALL = {"cpu": "2", "memory": "8Gi", "ephemeral-storage": "40Gi"}
# what every container bears, also one that runs as root
CONFINED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# every pod has a /tmp, which counts against its disk
TMP_GIB = 2
Manifest = dict[str, Any]


def metadata(values: Values, name: str, part: str) -> Manifest:
    """Name, namespace and labels of an object."""
    return {"name": name, "namespace": values.namespace, "labels": labels(values, part)}


def labels(values: Values, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": values.name, "app.kubernetes.io/component": part}


def resources(cpu: str | int, memory: str, disk: str, devices: bool = False) -> Manifest:
    """Requests that equal the limits, so that the pod is of the guaranteed class; devices by claim."""
    wanted = {"cpu": str(cpu), "memory": memory, "ephemeral-storage": disk}
    return {"requests": wanted, "limits": dict(wanted)} | ({"claims": [{"name": CLAIM}]} if devices else {})


def small() -> Manifest:
    return {"requests": dict(SMALL), "limits": dict(SMALL)}


def tool(
    values: Values, name: str, command: list[str], mounts: list[Manifest], sized: Manifest | None = None
) -> Manifest:
    """A container of our own image: no shell, no root, no rights, nothing to write but its volumes."""
    return {
        "name": name,
        "image": values.images.tools,
        "command": command,
        "env": environment({"AWS_REGION": values.region, "HOME": "/tmp"}),
        "resources": sized or small(),
        "volumeMounts": [*mounts, mount("tmp", "/tmp")],
        "securityContext": restricted(values),
    }


def restricted(values: Values) -> Manifest:
    """No root, no rights, a root file system that cannot be written."""
    return CONFINED | {
        "runAsNonRoot": True,
        "runAsUser": values.storage.uid,
        "runAsGroup": values.storage.gid,
        "readOnlyRootFilesystem": True,
    }


def api_key(values: Values, variable: str) -> Manifest:
    """The servers' key as a variable, from the operator's Secret."""
    return {
        "name": variable,
        "valueFrom": {"secretKeyRef": {"name": values.server.api_key_secret, "key": "api-key"}},
    }


def environment(variables: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def mount(name: str, path: str, read_only: bool = False) -> Manifest:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def scratch(name: str, gib: int) -> Manifest:
    """A volume on the node's own disk."""
    return {"name": name, "emptyDir": {"sizeLimit": f"{gib}Gi"}}


def shared_memory(gib: int) -> Manifest:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}


def pod(values: Values, role: str, containers: list[Manifest], volumes: list[Manifest], **more: Any) -> Manifest:
    """A pod's spec under the account of a role."""
    return {
        "serviceAccountName": account(values, role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"fsGroup": values.storage.gid, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": containers,
        "volumes": [*volumes, scratch("tmp", TMP_GIB)],
    } | more


def on_device_node(values: Values) -> Manifest:
    """Where a pod with Neuron devices, or with a whole node's processors, goes."""
    return {
        "nodeSelector": {"node.kubernetes.io/instance-type": values.device.instance_type},
        "tolerations": [{"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}],
    }


def claims(values: Values) -> list[Manifest]:
    return [{"name": CLAIM, "resourceClaimTemplateName": claim_name(values)}]


def job(values: Values, part: str, spec: Manifest, deadline_seconds: int) -> Manifest:
    """A Job that is tried once: a failure is read, not repeated. It cannot be changed, so its name has the version."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(values, f"{values.name}-{part}-{values.version}", part),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_seconds,
            "template": {"metadata": {"labels": labels(values, part)}, "spec": {"restartPolicy": "Never"} | spec},
        },
    }
