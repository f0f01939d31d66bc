"""Strict offline validation of a manifest against the schemas of a Kubernetes version."""

from __future__ import annotations

from typing import Any

from model.errors import UserError


def validate(manifest: dict[str, Any], kubernetes: str) -> None:
    """Raise UserError if a manifest has an unknown field, a wrong type, or a kind that the version lacks.

    The schemas are those that the package kubernetes-validate carries, in their strict form.
    """
    # a development tool: the pods, which run fetch and keep, do without it
    try:
        from kubernetes_validate import utils  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            "manifests are validated with kubernetes-validate, which is missing; run pip install 'trnspec[deploy]'"
        ) from error
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    try:
        used = utils.validate(manifest, kubernetes, strict=True)
    except utils.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "its top"
        raise UserError(f"{name} does not fit Kubernetes {kubernetes} at {where}: {error.message}") from error
    except utils.SchemaNotFoundError as error:
        kind = f"{manifest['apiVersion']} {manifest['kind']}"
        raise UserError(f"Kubernetes {kubernetes} has no {kind}; change the version") from error
    except (utils.VersionNotSupportedError, ValueError) as error:
        latest = utils.latest_version()
        raise UserError(f"no schemas of Kubernetes {kubernetes!r} are at hand; name one up to {latest}") from error
    # an older version's schemas would be taken in silence
    if used != ".".join(kubernetes.split(".")[:2]):
        raise UserError(f"no schemas of Kubernetes {kubernetes} are at hand, only of {used}; change the version")
