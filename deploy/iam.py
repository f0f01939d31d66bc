"""Who may do what: a service account for each kind of pod, and the smallest policy of each role.

No account id is needed: EKS Pod Identity ties a role to a service account by the cluster's name. The
bucket is mounted by the CSI driver with its own account in kube-system, which takes the policy
`bucket-read`.
"""

from __future__ import annotations

from typing import Any

from deploy.values import Values

SERVE, COMPILE, BENCH = "serve", "compile", "bench"


def service_accounts(values: Values) -> list[dict[str, Any]]:
    """The pods' accounts; the servers' has no rights at all."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": account(values, role), "namespace": values.namespace},
            "automountServiceAccountToken": False,
        }
        for role in (SERVE, COMPILE, BENCH)
    ]


def account(values: Values, role: str) -> str:
    return f"{values.name}-{role}"


def _allow(actions: list[str], resource: str, condition: dict[str, Any] | None = None) -> dict[str, Any]:
    statement: dict[str, Any] = {"Effect": "Allow", "Action": actions, "Resource": resource}
    return statement | ({"Condition": condition} if condition else {})


def policies(values: Values) -> dict[str, dict[str, Any]]:
    """Policy documents by the role they are for."""
    store = values.storage
    bucket = f"arn:{values.partition}:s3:::{store.bucket}"
    ours = f"{bucket}/{store.prefix}"
    bundles = f"{ours}/bundles/*"
    read = [
        _allow(["s3:ListBucket"], bucket, {"StringLike": {"s3:prefix": [f"{store.prefix}/*"]}}),
        _allow(["s3:GetObject"], f"{ours}/*"),
    ]
    write = ["s3:PutObject", "s3:AbortMultipartUpload"]
    # PutMetricData knows no resource; the namespace is its bound
    namespace = {"StringEquals": {"cloudwatch:namespace": values.load_test.cloudwatch_namespace}}
    return {
        "bucket-read": _policy(read),
        COMPILE: _policy([*read, _allow(write, bundles), _never_replaced(f"{bundles}/manifest.json")]),
        BENCH: _policy([_allow(["cloudwatch:PutMetricData"], "*", namespace), _allow(write, f"{ours}/results/*")]),
    }


def _never_replaced(resource: str) -> dict[str, Any]:
    """An object may be put only by a request that fails where there is one; the store sends If-None-Match."""
    missing = {"Null": {"s3:if-none-match": "true"}}
    return {"Effect": "Deny", "Action": "s3:PutObject", "Resource": resource, "Condition": missing}


def trust() -> dict[str, Any]:
    """The trust policy of every role that EKS Pod Identity hands out."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "pods.eks.amazonaws.com"},
        "Action": ["sts:AssumeRole", "sts:TagSession"],
    }
    return _policy([statement])


def _policy(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}
