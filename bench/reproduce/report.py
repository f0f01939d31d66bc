"""The report on the article as markdown and one picture, from committed results alone."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from bench.demo import ENTROPIES
from bench.plots import line, panels
from bench.provenance import said
from bench.reproduce.claims import CLAIMS, gain, ms, ratio, same, swept, wall
from bench.table import markdown
from bench.tune import drafters

Results = dict[str, Any]
_DRAFTS = ("draft", "draft_small")
_INTRODUCTION = (
    "# The article's claims, one by one",
    "",
    "Made by `python -m bench.reproduce`; `--report` writes this page again from the results beside it. Simulated",
    "figures are for Qwen3-32B on eight Trainium2 chips (tp 32, two cores a rank, four sequences); nobody has measured",
    "them. Wall figures are of the demo pair, stand-ins of a few million parameters on one CPU thread, and say nothing",
    "about Qwen3-32B. [a, b] is the band of all uncertain constants. Every simulated ms per token contains the launch",
    "of a step's graph: the host's dispatch, published as 0.8 ms (0.5 to 1), and the device's start.",
    "",
)


def _claims(results: Results) -> str:
    heads = ["the article says", "the model predicts for its hardware (simulated)", "demo pair here (wall)", "verdict"]
    return markdown(heads, [[c.said, c.modelled(results), c.measured(results), c.verdict(results)] for c in CLAIMS])


def _modelled(results: Results) -> str:
    heads = ["draft", "acceptance", "rate", "best k", "ms per token (simulated)", "gain (simulated)"]
    heads += [f"gain at k = {k} (simulated)" for k in (7, 15)]
    sweep = {(r["draft"], r["workload"], r["k"]): r for r in results["model"]["sweep"]}
    return markdown(heads, [
        [b["draft"], b["workload"], f"{b['rate']:.3f}", str(b["k"]), ms(b), gain(b),
         *(f"{sweep[b['draft'], b['workload'], k]['gain']:.2f}x" for k in (7, 15))]
        for b in results["model"]["best"]
    ])  # fmt: skip


def _measured(results: Results) -> str:
    heads = ["way", "prompts", "ms per token after the first (wall)", "gain [p20, p80] (wall)", "tokens a step (wall)",
             "TTFT, ms (wall)"]  # fmt: skip
    return markdown(heads, [
        [r["way"], r["entropy"], f"{r['itl_ms']:.3f}", "{1:.2f}x [{0:.2f}, {2:.2f}]".format(*r["times_itl"]),
         f"{r['tokens_per_step']:.2f}", f"{r['first_ms']:.1f}"]
        for r in results["wall"]["rows"] if "ms" in r
    ])  # fmt: skip


def _in_short(results: Results) -> list[str]:
    best = (r for r in results["model"]["best"] if r["draft"] == "1.7B")
    found = ", ".join(f"{r['workload']} {r['gain']:.2f}x at k = {r['k']}" for r in best)
    walls = ", ".join(f"{e} {ratio(results, e, 7):.1f}x" for e in ENTROPIES)
    return [
        f"- In short, simulated, 1.7B draft: {found}.",
        f"- In short, wall, demo pair, k = 7: {walls}; the same tokens in {same(results)} runs.",
        f"- modelled: {said(results['model'])}",
        f"- measured: {said(results['wall'])}; {results['wall']['settings']}",
    ]


def report(results: Results, picture_name: str) -> str:
    """All of it; modelled and measured figures are in different columns everywhere."""
    parts = [
        *_INTRODUCTION, *_in_short(results), "", _claims(results), "",
        f"![gain over k, simulated and wall]({picture_name})", "",
        "## Modelled: both drafts on the article's hardware", "", _modelled(results), "",
        "The two assumed rates are no measurements: 0.60 stands for open prose, 0.95 for near-copying. No acceptance",
        "table of the 0.6B is published, so only the assumed rates are shown.", "",
        drafters.table(results["model"]["drafters"]), "", "## Measured: the demo pair on this machine", "",
        "A gain is the median of ratios, each of one prompt in one round: all ways serve it there within seconds, in",
        "random order. The target alone is a bundle of its own (`--k 0`), without a draft to prefill.", "",
        _measured(results), "",
    ]  # fmt: skip
    return "\n".join(parts)


def picture(results: Results) -> Figure:
    """Gain over k, modelled and measured in panels of their own."""
    figure, (modelled, measured) = panels(1, 2)
    for draft, workload in dict.fromkeys((r["draft"], r["workload"]) for r in results["model"]["sweep"]):
        rows = [r for r in results["model"]["sweep"] if (r["draft"], r["workload"]) == (draft, workload)]
        line(modelled, f"{draft}, {workload}", {r["k"]: (r["gain_low"], r["gain"], r["gain_high"]) for r in rows})
    modelled.set(title="simulated, Qwen3-32B, 8 chips, batch 4", xlabel="k", ylabel="times the target alone")
    for draft in _DRAFTS:
        for entropy in ENTROPIES:
            found = {k: wall(results, entropy, k, draft)["times_itl"] for k in swept(results, draft)}
            line(measured, f"{draft}, {entropy}", found)
    measured.set(title="wall, demo pair, p20 to p80", xlabel="k", ylabel="times the target alone")
    for axes in (modelled, measured):
        axes.legend(fontsize=7)
    return figure
