"""`python -m deploy.publish RESULT.json`: sends a result of bench.serving to CloudWatch and a Prometheus Pushgateway.

Each row of the result is a server, a class of prompts and a number of clients: dimensions in CloudWatch, labels in
Prometheus, together with BUNDLE. Metrics have the names of `vllm bench serve`, as median_ttft_ms. The namespace is
CLOUDWATCH_NAMESPACE, the gateway's address PUSHGATEWAY; a destination whose variable is empty is left out.
"""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from model.errors import UserError, command_line, run_cli

LABELS = ("server", "prompts", "clients")
Sample = tuple[dict[str, str], str, float]


def samples(rows: Iterable[dict[str, Any]], bundle: str) -> list[Sample]:
    """(labels, metric, value) of each figure of each row; ratios to other rows are left out."""
    named = [({"bundle": bundle} | {name: str(row[name]) for name in LABELS}, row) for row in rows]
    return [
        (labels, metric, float(value))
        for labels, row in named
        for metric, value in row.items()
        if metric not in (*LABELS, "rounds") and re.fullmatch(r"\w+", metric)
    ]


def to_cloudwatch(rows: Iterable[Sample], namespace: str) -> None:
    """One request: PutMetricData takes 1,000 values, and a result has some dozens."""
    data = [
        {
            "MetricName": metric,
            "Dimensions": [{"Name": name, "Value": label} for name, label in labels.items()],
            "Value": value,
            "Unit": "Milliseconds" if metric.endswith("_ms") else "None",
        }
        for labels, metric, value in rows
    ]
    boto3.client("cloudwatch").put_metric_data(Namespace=namespace, MetricData=data)


def exposition(rows: Iterable[Sample]) -> str:
    """The samples as gauges in Prometheus' text format, the lines of a metric together."""
    lines = dict[str, list[str]]()
    for labels, metric, value in rows:
        inner = ",".join(f"{name}={json.dumps(label, ensure_ascii=False)}" for name, label in labels.items())
        lines.setdefault(f"specdec_bench_{metric}", []).append(f"{{{inner}}} {value}")
    return "".join(f"# TYPE {name} gauge\n" + "".join(f"{name}{v}\n" for v in lines[name]) for name in lines)


def to_pushgateway(rows: Iterable[Sample], address: str) -> None:
    """Replaces what an earlier run has pushed."""
    url, body = f"{address.rstrip('/')}/metrics/job/specdec_bench", exposition(rows).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, method="PUT"), timeout=30).close()


def main(arguments: list[str]) -> None:
    """Print the samples and send them; UserError for a file without them or a destination that refuses."""
    does = "Send a result of bench.serving to CLOUDWATCH_NAMESPACE and PUSHGATEWAY, with the label BUNDLE."
    parser = command_line("deploy.publish", does, "serving.json")
    parser.add_argument("result", type=Path, help="file that --out of bench.serving wrote")
    file = parser.parse_args(arguments).result
    try:
        rows = samples(json.loads(file.read_text(encoding="utf-8"))["rows"], os.environ.get("BUNDLE", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no result of bench.serving ({error!r}); give the file of its --out") from error
    print(exposition(rows), end="")
    try:
        if namespace := os.environ.get("CLOUDWATCH_NAMESPACE"):
            to_cloudwatch(rows, namespace)
        if address := os.environ.get("PUSHGATEWAY"):
            to_pushgateway(rows, address)
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        raise UserError(f"the metrics were refused: {error}; correct the destination and run it again") from error


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
