"""A published result: what CloudWatch and a Pushgateway have received, and what is left out."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from deploy import publish
from model.errors import UserError

ROWS = [
    {"prompts": 'a "b"', "clients": 4, "server": name, "rounds": 2, "median_ttft_ms": 21.5, "p99_itl_ms": itl,
     "output_throughput": 1200.0} | more
    for name, itl, more in (("baseline", 7.5, {}), ("speculative", 9.25, {"times baseline": 2.0}))
]  # fmt: skip


@mock_aws
def test_a_result_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client, pushed = boto3.client("cloudwatch", "us-west-2"), list[Any]()
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: pushed.append(request) or BytesIO())
    (file := tmp_path / "serving.json").write_text(json.dumps({"source": "wall", "rows": ROWS}))
    for name, value in (("CLOUDWATCH_NAMESPACE", ""), ("BUNDLE", "pair"), ("AWS_DEFAULT_REGION", "us-west-2")):
        monkeypatch.setenv(name, value)
    publish.main([str(file)])
    assert client.list_metrics()["Metrics"] == pushed == []
    printed = capsys.readouterr().out
    monkeypatch.setenv("PUSHGATEWAY", "http://gateway:9091/")
    monkeypatch.setenv("CLOUDWATCH_NAMESPACE", "specdec")
    publish.main([str(file)])
    actual = {(m["MetricName"], *(d["Value"] for d in m["Dimensions"])) for m in client.list_metrics()["Metrics"]}
    names = ("median_ttft_ms", "p99_itl_ms", "output_throughput")
    assert actual == {(n, "pair", s, 'a "b"', "4") for n in names for s in ("baseline", "speculative")}
    sent = ("PUT", "http://gateway:9091/metrics/job/specdec_bench", printed.encode())
    assert [(request.method, request.full_url, request.data) for request in pushed] == [sent]
    # Prometheus wants the lines of a metric together, below its type, and quotes escaped
    labels = [f'{{bundle="pair",server="{s}",prompts="a \\"b\\"",clients="4"}}' for s in ("baseline", "speculative")]
    metric = "specdec_bench_p99_itl_ms"
    assert f"# TYPE {metric} gauge\n{metric}{labels[0]} 7.5\n{metric}{labels[1]} 9.25\n" in printed


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "serving.json").write_text(json.dumps({"rows": [{"server": "baseline"}]}))
    with pytest.raises(UserError, match=r"no result of bench\.serving .* give the file of its --out"):
        publish.main([str(file)])
    file.write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setenv("BUNDLE", "pair")
    # nothing listens on the discard port of this host, and a URL needs a scheme
    for gateway in ("http://127.0.0.1:9/", "gateway:9091/"):
        monkeypatch.setenv("PUSHGATEWAY", gateway)
        with pytest.raises(UserError, match=r"the metrics were refused: .*; correct the destination"):
            publish.main([str(file)])
