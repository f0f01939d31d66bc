"""Publish a run to CloudWatch: the article's metrics and dimensions, and what it left out.

Every request's value is published, so CloudWatch computes any percentile itself. The article's pod
had the dimensions Variant (SD, Base) and TestCase; each metric is published with these, and once
more with K and Draft, so that sweeps can be told apart. Limits are those of PutMetricData: 150
values a datum, 1000 datums and 1 MB a request. Credentials come from the standard AWS chain alone.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.serving.figures import values
from bench.serving.run import Run
from bench.serving.sample import Sample
from model.errors import UserError

_VARIANTS = {"baseline": "Base", "speculative": "SD"}
# name, unit and the sample's figure
_FIGURES = (
    ("TTFT", "Seconds", "ttft_s"),
    ("InterTokenLatency", "Seconds", "itl_s"),
    ("EndToEndLatency", "Seconds", "e2e_s"),
    ("InputTokens", "Count", "prompt_tokens"),
    ("OutputTokens", "Count", "tokens"),
    ("RequestOutputThroughput", "Count/Second", "tokens_per_second"),
)
_VALUES_PER_DATUM = 150
_DATUMS_PER_REQUEST = 1000
# as a form, a value takes about 60 bytes: a quarter of the 1 MB that a request may have
_VALUES_PER_REQUEST = 4000


def dimension(value: str) -> str:
    """A dimension's value: ASCII words joined by underscores, without one at either end."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", value).strip("_")[:250] or "none"


def data(run: Run, when: datetime.datetime) -> list[dict[str, Any]]:
    """The MetricData of a run."""
    settings, found = run.summary["run"]["settings"], []
    sweep = {"K": str(settings["k"]), "Draft": dimension(settings["draft"] or "unnamed")}
    for row in run.summary["rows"]:
        samples = [s for s in run.samples if (s.variant, s.case) == (row["variant"], row["case"])]
        short = {"Variant": _VARIANTS[row["variant"]], "TestCase": dimension(row["case"])}
        # a baseline has neither k nor a draft
        full = short | (sweep if row["variant"] == "speculative" else {"K": "0", "Draft": "none"})
        for dimensions in (short, full):
            named = [{"Name": n, "Value": v} for n, v in dimensions.items()]
            for name, unit, numbers in _metrics(row, samples, run.summary["gate"]["passed"]):
                for start in range(0, len(numbers), _VALUES_PER_DATUM):
                    part = numbers[start : start + _VALUES_PER_DATUM]
                    found.append(
                        {"MetricName": name, "Dimensions": named, "Unit": unit, "Timestamp": when, "Values": part}
                    )
    return found


def _metrics(
    row: dict[str, Any], samples: Sequence[Sample], identical: bool | None
) -> Iterator[tuple[str, str, list[float]]]:
    for name, unit, figure in _FIGURES:
        yield name, unit, values(samples, figure)
    yield "Requests", "Count", [float(row["requests"])]
    yield "Errors", "Count", [float(row["errors"])]
    if identical is not None:
        yield "TokenIdentical", "None", [float(identical)]
    if "acceptance" in row:
        yield "AcceptanceLength", "None", [row["acceptance"]["length"]]
        yield "AcceptanceRate", "None", [row["acceptance"]["rate"]]
        yield "DraftTokensPerStep", "Count", [float(row["acceptance"]["k"])]


def requests(datums: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The datums in parts that one request may carry."""
    part: list[dict[str, Any]] = []
    for datum in datums:
        held = sum(len(d["Values"]) for d in part)
        if part and (len(part) == _DATUMS_PER_REQUEST or held + len(datum["Values"]) > _VALUES_PER_REQUEST):
            yield part
            part = []
        part.append(datum)
    if part:
        yield part


def publish(namespace: str, run: Run) -> int:
    """Send a run's metrics; returns how many datums went. UserError in one sentence if AWS refuses."""
    # boto3 is an extra: without --cloudwatch nobody needs it
    try:
        import boto3  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError as error:
        raise UserError("--cloudwatch needs boto3, which is not installed; run pip install 'trnspec[s3]'") from error
    datums = data(run, datetime.datetime.now(datetime.timezone.utc))
    try:
        client = boto3.client("cloudwatch")
        for part in requests(datums):
            client.put_metric_data(Namespace=namespace, MetricData=part)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "an error")
        raise UserError(
            f"CloudWatch refused the metrics ({code}); give the role cloudwatch:PutMetricData for {namespace}"
        ) from error
    except BotoCoreError as error:
        raise UserError(
            f"CloudWatch cannot be reached ({type(error).__name__}); set the region and credentials of the AWS chain"
        ) from error
    return len(datums)
