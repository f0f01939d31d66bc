"""A Grafana dashboard of the servers' metrics as JSON, to import with a Prometheus data source.

Metric names are those of vLLM's Prometheus endpoint (V1 engine; the counters of speculation count drafts before a stop
string or an end-of-sequence id cuts them).
"""

from __future__ import annotations

from typing import Any

from deploy.server import VARIANTS
from deploy.values import Values

_WIDTH, _HEIGHT = 12, 8
# title | unit | legend | expression, with {of} for the selector of one server
_PANELS = (
    ("Time per output token, p50", "s", "vllm:request_time_per_output_token_seconds", 0.5),
    ("Time per output token, p99", "s", "vllm:request_time_per_output_token_seconds", 0.99),
    ("Time to first token, p50", "s", "vllm:time_to_first_token_seconds", 0.5),
    ("End to end latency, p99", "s", "vllm:e2e_request_latency_seconds", 0.99),
)
_RATES = (
    ("Output tokens a second", "short", "rate(vllm:generation_tokens_total{{{of}}}[$__rate_interval])"),
    ("Requests running and waiting", "short", "vllm:num_requests_running{{{of}}} + vllm:num_requests_waiting{{{of}}}"),
    (
        "Drafts accepted of drafts proposed",
        "percentunit",
        "rate(vllm:spec_decode_num_accepted_tokens_total{{{of}}}[$__rate_interval]) / "
        "rate(vllm:spec_decode_num_draft_tokens_total{{{of}}}[$__rate_interval])",
    ),
    (
        "Tokens a step, vLLM's count",
        "short",
        "1 + rate(vllm:spec_decode_num_accepted_tokens_total{{{of}}}[$__rate_interval]) / "
        "rate(vllm:spec_decode_num_drafts_total{{{of}}}[$__rate_interval])",
    ),
)


def dashboard(values: Values) -> dict[str, Any]:
    """One row of panels a subject, one line a server."""
    quantiles = [
        (title, unit, f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{{{{of}}}}}}[$__rate_interval])))")
        for title, unit, metric, q in _PANELS
    ]
    panels = [_panel(values, number, *row) for number, row in enumerate([*quantiles, *_RATES])]
    return {
        "title": f"{values.name}: speculation against baseline",
        "uid": values.name,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def _panel(values: Values, number: int, title: str, unit: str, expression: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "$source"}
    targets = [
        {
            "refId": variant[0].upper(),
            "datasource": source,
            "legendFormat": variant,
            "expr": expression.format(of=f'namespace="{values.namespace}",service="{values.server_name(variant)}"'),
        }
        for variant in VARIANTS
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
