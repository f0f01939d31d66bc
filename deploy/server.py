"""The two servers: the same flags but for speculation, each behind a Service of its own, with one of two engines.

`nxdi`: flags and variables are those of the NxDI loader of vLLM's V0 engine, the last that takes a
plain draft model in its fused graph. It recompiles for hours when it finds no artifact; here it
can't: an init container refuses first, and the server's own view of the bundle is read-only.
It misses `restricted` pod security in one point: the vendor's image runs as root, and whether
another user may open the Neuron devices that the DRA driver hands in is not documented. The engine
also writes beside its code, so its root file system stays writable.

`trnspec`: current vLLM with our plugin, which takes all it serves from the bundle.
"""

from __future__ import annotations

from typing import Any

from compile import serve_command
from deploy.expected import Expected
from deploy.iam import SERVE
from deploy.pods import (
    CONFINED,
    TMP_GIB,
    Manifest,
    api_key,
    claims,
    environment,
    labels,
    metadata,
    mount,
    on_device_node,
    pod,
    resources,
    restricted,
    scratch,
    shared_memory,
    tool,
)
from deploy.storage import MOUNT, bucket_mount, bucket_volume
from deploy.values import Values

BASELINE, SPECULATIVE = "baseline", "speculative"
VARIANTS = (BASELINE, SPECULATIVE)
_BUNDLE = "/bundle"
_PROBE_SECONDS = 10
# a pod that ends is out of every router's list before its server hears of it
_LEAVE_SECONDS = 10
# what running requests get to end, and the process after them
DRAIN_SECONDS, _END_SECONDS = 60, 20


def expected(values: Values, variant: str) -> Expected:
    """What the variant's bundle must have been built for."""
    m = values.model
    k, drafter = (m.k, m.drafter) if variant == SPECULATIVE else (0, "none")
    return Expected(m.tp, m.batch, m.max_len, k, values.device.lnc, drafter)


def nxdi_arguments(values: Values, variant: str) -> dict[str, Any]:
    """NxDI's arguments by their names in Python; the flags have hyphens."""
    m = values.model
    k = m.k if variant == SPECULATIVE else 0
    folders = f"{MOUNT}/{m.target_folder}", f"{MOUNT}/{m.draft_folder}"
    asked = serve_command.engine_arguments(serve_command.Served(*folders, m.tp, m.batch, m.max_len, k))
    # the baseline ends its sequences where the speculative server must
    return asked | {"max_model_len": m.max_len - m.k}


def _nxdi(values: Values, variant: str) -> Manifest:
    """What a container of the vendor's engine has of its own: command, variables, mounts, rights."""
    asked, m = nxdi_arguments(values, variant), values.model
    return {
        "command": serve_command.engine_command(asked, m.target, values.server.port),
        "env": environment(serve_command.engine_environment(_folder(values, variant), values.device.lnc)),
        "volumeMounts": [bucket_mount()],
        "securityContext": CONFINED,
    }


def _trnspec(values: Values, variant: str) -> Manifest:
    """The same for vLLM with our plugin. What it derives from the bundle is written below HOME."""
    flags = {
        "served-model-name": values.model.target,
        "port": values.server.port,
        "shutdown-timeout": DRAIN_SECONDS,
    }
    called = (part for name, value in flags.items() for part in (f"--{name}", str(value)))
    variables = {"HOME": "/tmp", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {
        "command": ["vllm", "serve", _folder(values, variant), *called],
        "env": environment(variables),
        "volumeMounts": [mount("tmp", "/tmp")],
        "securityContext": restricted(values),
    }


_ENGINES = {"nxdi": _nxdi, "trnspec": _trnspec}


def command(values: Values, variant: str) -> list[str]:
    """The server's process itself, without a shell before it: a signal to the pod reaches it."""
    called: list[str] = _ENGINES[values.server.engine](values, variant)["command"]
    return called


def _folder(values: Values, variant: str) -> str:
    """The bundle inside the server's pod."""
    return f"{_BUNDLE}/{values.bundle_name(variant)}"


def _fetch(values: Values, variant: str) -> Manifest:
    source = f"{MOUNT}/bundles/{values.bundle_name(variant)}"
    called = ["python", "-m", "deploy.fetch", source, _folder(values, variant)]
    sized = resources(8, "32Gi", f"{values.server.disk_gib + TMP_GIB}Gi")
    mounts = [bucket_mount(), mount("bundle", _BUNDLE)]
    return tool(values, "fetch", called + expected(values, variant).arguments, mounts, sized)


def _container(values: Values, variant: str) -> Manifest:
    s, engine = values.server, _ENGINES[values.server.engine](values, variant)
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_SECONDS, "timeoutSeconds": 5}
    return {
        "name": "server",
        "image": values.images.server,
        "command": command(values, variant),
        "env": [*engine["env"], api_key(values, "VLLM_API_KEY")],
        "ports": [{"name": "http", "containerPort": s.port}],
        "resources": resources(s.cpu, f"{s.memory_gib}Gi", f"{s.disk_gib + TMP_GIB}Gi", devices=True),
        "volumeMounts": [
            mount("shm", "/dev/shm"),
            mount("bundle", _BUNDLE, read_only=True),
            *engine["volumeMounts"],
        ],
        "securityContext": engine["securityContext"],
        "lifecycle": {"preStop": {"sleep": {"seconds": _LEAVE_SECONDS}}},
        "startupProbe": health | {"failureThreshold": -(-s.startup_seconds // _PROBE_SECONDS)},
        "readinessProbe": health | {"failureThreshold": 2},
        "livenessProbe": health | {"failureThreshold": 6},
    }


def deployment(values: Values, variant: str) -> Manifest:
    """A server and its replicas. A new one starts after an old one has gone: both would need the same devices."""
    s, name = values.server, values.server_name(variant)
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels(values, variant)}}
    spec = pod(
        values,
        SERVE,
        [_container(values, variant)],
        [shared_memory(s.shm_gib), scratch("bundle", s.disk_gib), bucket_volume(values)],
        initContainers=[_fetch(values, variant)],
        resourceClaims=claims(values),
        terminationGracePeriodSeconds=_LEAVE_SECONDS + DRAIN_SECONDS + _END_SECONDS,
        affinity={
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": apart}]
            }
        },
        **on_device_node(values),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(values, name, variant),
        "spec": {
            "replicas": s.replicas,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": s.startup_seconds + 600,
            "selector": {"matchLabels": labels(values, variant)},
            "template": {"metadata": {"labels": labels(values, variant)}, "spec": spec},
        },
    }


def service(values: Values, variant: str) -> Manifest:
    """Reached by its name inside the cluster alone."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(values, values.server_name(variant), variant),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(values, variant),
            "ports": [{"name": "http", "port": values.server.port, "targetPort": "http"}],
        },
    }


def disruption_budget(values: Values, variant: str) -> Manifest:
    """At most one replica at a time gives way to maintenance of a node."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(values, values.server_name(variant), variant),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(values, variant)}},
    }
