"""Acceptance as the server counts it: vLLM's Prometheus counters before and after, and their ratio.

The counters are vLLM's: vllm:spec_decode_num_drafts, _num_draft_tokens, _num_accepted_tokens and
_num_accepted_tokens_per_pos, with or without the suffix _total. The older engine has no count of
drafts but of emitted tokens: one more than accepted at every step. They count all of the server's
traffic, so a server under other load than ours gives no acceptance of ours.
"""

from __future__ import annotations

import re
from typing import Any

import httpx2

_PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Counters = dict[str, float]


def parse_metrics(text: str) -> Counters:
    """The speculation counters of a Prometheus page, summed over engines; positions as `per_pos/0`."""
    found: Counters = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match or not match[1].startswith(_PREFIX) or match[1].endswith("_created"):
            continue
        name = match[1][len(_PREFIX) :].removesuffix("_total")
        labels = dict(_LABEL.findall(match[2] or ""))
        if name == "accepted_tokens_per_pos":
            name = f"per_pos/{int(labels.get('position', 0))}"
        found[name] = found.get(name, 0.0) + float(match[3])
    return found


async def read_counters(client: httpx2.AsyncClient, url: str) -> Counters:
    """The endpoint's counters; empty when it offers none."""
    try:
        answer = await client.get(f"{url}/metrics", timeout=30)
    except httpx2.HTTPError:
        return {}
    return parse_metrics(answer.text) if answer.status_code == 200 else {}


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted in between; empty when a counter fell, that is when the server was restarted."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {} if any(value < 0 for value in grown.values()) else grown


def add(total: Counters, more: Counters) -> Counters:
    return {name: total.get(name, 0.0) + more.get(name, 0.0) for name in {*total, *more}}


def acceptance(counted: Counters) -> dict[str, Any] | None:
    """Rate, length (tokens a step, the target's own included), k, and both shares of every position.

    `unconditional` is the share of steps in which a position was accepted (vLLM's meaning),
    `conditional` the share among the steps that accepted all positions before it.
    """
    accepted, proposed = counted.get("accepted_tokens", 0.0), counted.get("draft_tokens", 0.0)
    steps = counted.get("drafts", counted.get("emitted_tokens", 0.0) - accepted)
    if steps <= 0 or proposed <= 0:
        return None
    positions = sorted((int(n.split("/")[1]), v) for n, v in counted.items() if n.startswith("per_pos/"))
    shares = [value / steps for _, value in positions]
    before = [1.0, *shares]
    return {
        "steps": int(steps),
        "draft_tokens": int(proposed),
        "accepted_tokens": int(accepted),
        "rate": accepted / proposed,
        "length": 1 + accepted / steps,
        "k": round(proposed / steps),
        "unconditional": shares,
        "conditional": [b / a if a else 0.0 for a, b in zip(before, shares, strict=False)],
    }
