"""One run: find the endpoints, warm up, gate, load, and sum up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2

from bench.provenance import header
from bench.serving import acceptance
from bench.serving.client import Endpoint, Prompt, ask, body, find_endpoint, http_client
from bench.serving.figures import ratio, summary_row, values
from bench.serving.gate import Verdict, compare
from bench.serving.load import BlockResult, plan, run_block, within
from bench.serving.options import Options
from bench.serving.prompts import TIERS
from bench.serving.sample import Sample

_SPEEDUPS = ("itl_s", "e2e_s", "ttft_s")
# what of the options is not a setting of the measurement
_NOT_SETTINGS = ("baseline", "speculative", "out", "report", "json", "cloudwatch")


class Shown(Protocol):
    """Who is told how far the run is."""

    def begin(self, stage: str, totals: dict[str, int]) -> None: ...

    def seen(self, sample: Sample) -> None: ...


@dataclass(frozen=True)
class Run:
    """What a run found: `summary` is what the report and CloudWatch are made from."""

    samples: tuple[Sample, ...]
    summary: dict[str, Any]


async def measure(options: Options, prompts: Sequence[Prompt], shown: Shown) -> Run:
    """Run everything; UserError when an endpoint does not answer at all."""
    async with http_client(options) as client:
        endpoints = {
            variant: await find_endpoint(client, variant, url, options.model)
            for variant, url in options.endpoints.items()
        }
        await _one_by_one("warm-up", client, options, endpoints, shown, _warm(options, prompts))
        gate = await _one_by_one("gate", client, options, endpoints, shown, _gated(options, prompts))
        results, counted = await _load(client, options, prompts, endpoints, shown)
    samples = tuple(s for r in results for s in r.samples)
    # answers at another temperature may differ; then the gate's own are all there is to compare
    verdict = compare([*gate, *samples] if options.temperature == 0 else gate)
    return Run(samples, _summary(options, endpoints, results, counted, verdict))


def _warm(options: Options, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompts[i % len(prompts)] for i in range(options.warmup)]


def _gated(options: Options, prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(prompts) if len(options.endpoints) == 2 else []


async def _one_by_one(
    stage: str,
    client: httpx2.AsyncClient,
    options: Options,
    endpoints: dict[str, Endpoint],
    shown: Shown,
    prompts: list[Prompt],
) -> list[Sample]:
    """One greedy request for each prompt on each endpoint, alone on the server."""
    shown.begin(stage, dict.fromkeys(endpoints, len(prompts)))
    samples = []
    for prompt in prompts:
        for variant, endpoint in endpoints.items():
            asked = ask(client, endpoint, body(options, endpoint, prompt, 0, 0.0))
            sample = await within(asked, options.timeout, variant)
            samples.append(dataclasses.replace(sample, case=prompt.name, index=-1))
            shown.seen(samples[-1])
    return samples


async def _load(
    client: httpx2.AsyncClient,
    options: Options,
    prompts: Sequence[Prompt],
    endpoints: dict[str, Endpoint],
    shown: Shown,
) -> tuple[list[BlockResult], dict[tuple[str, str], acceptance.Counters]]:
    shown.begin("load", dict.fromkeys(endpoints, options.requests * len(prompts)))
    results: list[BlockResult] = []
    counted: dict[tuple[str, str], acceptance.Counters] = {}
    for block in plan(options, prompts):
        endpoint, key = endpoints[block.variant], (block.variant, block.prompt.name)
        before = await acceptance.read_counters(client, endpoint.url)
        results.append(await run_block(client, options, endpoint, block, shown.seen))
        grown = acceptance.difference(before, await acceptance.read_counters(client, endpoint.url))
        counted[key] = acceptance.add(counted.get(key, {}), grown)
    return results, counted


def _summary(
    options: Options,
    endpoints: dict[str, Endpoint],
    results: Sequence[BlockResult],
    counted: dict[tuple[str, str], acceptance.Counters],
    verdict: Verdict,
) -> dict[str, Any]:
    by_key: dict[tuple[str, str], list[BlockResult]] = {}
    for result in results:
        by_key.setdefault((result.block.variant, result.block.prompt.name), []).append(result)
    ordered = sorted(by_key, key=lambda key: (_tier(by_key[key]), key[1], key[0]))
    rows = [summary_row(by_key[key], acceptance.acceptance(counted[key])) for key in ordered]
    k = options.k or next((r["acceptance"]["k"] for r in rows if "acceptance" in r), 0)
    samples = {key: [s for r in by_key[key] for s in r.samples] for key in ordered}
    return {
        "run": _header(options, endpoints, k),
        "notes": _notes(rows, options),
        "gate": verdict.as_json(),
        "rows": rows,
        "speedup": _speedups(samples, {r["case"]: r["tier"] for r in rows}) if verdict.passed else [],
    }


def _tier(results: Sequence[BlockResult]) -> int:
    tier = results[0].block.prompt.tier
    return TIERS.index(tier) if tier in TIERS else len(TIERS)


def _speedups(samples: dict[tuple[str, str], list[Sample]], tiers: dict[str, str]) -> list[dict[str, Any]]:
    """Baseline over speculative at the median, per prompt; above 1 speculation is the faster."""
    found = []
    for case in dict.fromkeys(case for _, case in samples):
        row: dict[str, Any] = {"case": case, "tier": tiers[case]}
        for figure in _SPEEDUPS:
            over, under = (values(samples[variant, case], figure) for variant in ("baseline", "speculative"))
            if over and under:
                row[figure] = ratio(over, under).as_list
        found.append(row)
    return found


def _notes(rows: Sequence[dict[str, Any]], options: Options) -> list[str]:
    notes = []
    if any(r["variant"] == "baseline" and "acceptance" in r for r in rows):
        notes.append("The baseline's own counters show speculation: it is no baseline.")
    if options.speculative and not any("acceptance" in r for r in rows if r["variant"] == "speculative"):
        notes.append("The speculative server offers no acceptance counters.")
    if options.requests < 100:
        notes.append(f"{options.requests} requests a point: p99 is close to the largest value.")
    if options.temperature > 0:
        notes.append("The gate compared answers made at temperature 0, not those that were timed.")
    return notes


def _header(options: Options, endpoints: dict[str, Endpoint], k: int) -> dict[str, Any]:
    settings = {n: v for n, v in dataclasses.asdict(options).items() if n not in _NOT_SETTINGS}
    if options.prompts:
        # a file's name, and no set: none was sent
        settings |= {"prompts": Path(options.prompts).name, "prompt_set": ""}
    return {
        **header("wall"),
        "endpoints": {v: {"host": httpx2.URL(e.url).netloc.decode(), "model": e.model} for v, e in endpoints.items()},
        "settings": settings | {"k": k},
    }
