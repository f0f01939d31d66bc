"""The report on the article as markdown, from committed results alone."""

from __future__ import annotations

import statistics
from typing import Any

from bench.provenance import said
from bench.reproduce.claims import CLAIMS, chosen, spread, swept, wall
from bench.serving.plots import COLOURS, Axes, Series, lines
from bench.tune.text import h100_sentence, markdown

Results = dict[str, Any]
MODELLED, MEASURED = "reproduce_modelled.svg", "reproduce_measured.svg"
ENTROPIES = ("structured", "open")
_K = "k, draft tokens per step"
_INTRODUCTION = (
    "# The article's claims, one by one",
    "",
    "Made by `python -m bench.reproduce`; rerun it to measure again, or with `--report` to write this page again from",
    "the results beside it. Simulated figures are for Qwen3-32B on eight Trainium2 chips (tp 32, two cores a rank,",
    "four sequences) and were measured nowhere. Wall figures are of the demo pair, stand-ins of a few million",
    "parameters on one CPU thread, and say nothing about Qwen3-32B. [a, b] is the band of all uncertain constants.",
    "",
)


def _claims(results: Results) -> str:
    heads = ["the article says", "the model predicts for its hardware (simulated)", "demo pair here (wall)", "verdict"]
    return markdown(heads, [[c.said, c.modelled(results), c.measured(results), c.verdict(results)] for c in CLAIMS])


def _modelled(results: Results) -> str:
    heads = ["draft", "acceptance", "rate", "best k", "ms per token (simulated)", "gain (simulated)", "gain at k = 7",
             "gain at k = 15"]  # fmt: skip
    sweep = {(r["draft"], r["workload"], r["k"]): r for r in results["model"]["sweep"]}
    return markdown(heads, [
        [b["draft"], b["workload"], f"{b['rate']:.3f}", str(b["k"]),
         f"{b['ms']:.2f} [{b['ms_low']:.2f}, {b['ms_high']:.2f}]",
         f"{b['gain']:.2f}x [{b['gain_low']:.2f}, {b['gain_high']:.2f}]",
         *(f"{sweep[b['draft'], b['workload'], k]['gain']:.2f}x" for k in (7, 15))]
        for b in results["model"]["best"]
    ])  # fmt: skip


def _drafters(results: Results) -> str:
    """The other drafters beside the article's."""
    heads = ["drafter", "k", "step, target passes (simulated)", "tokens a step", "gain (simulated)", "tokens from"]
    rows = [
        [f"{r['drafter']} {r['model']}".strip(), str(r["k"]), f"{r['step']:.2f}",
         f"{r['tokens']:.2f}{' (assumed)' if r['assumed'] else ''}",
         f"{r['gain']:.2f}x [{r['gain_low']:.2f}, {r['gain_high']:.2f}]", f"{r['workload']}: {r['source']}"]
        for r in results["model"]["drafters"]
    ]  # fmt: skip
    return markdown(heads, rows)


def _measured(results: Results) -> str:
    heads = ["draft", "k", "prompts", "ms per token (wall)", "gain [p20, p80] (wall)", "tokens a step (wall)",
             "TTFT, ms (wall)"]  # fmt: skip
    rows = []
    for draft, k in sorted({(r["draft"], r["k"]) for r in results["wall"]["rows"]}, key=lambda d: (d[1] > 0, d)):
        for entropy in ENTROPIES:
            at = {"draft": draft, "k": k, "entropy": entropy}
            low, gain, high = spread(results, entropy, k, draft=draft)
            rows.append([
                draft if k else "target alone", str(k), entropy, f"{wall(results, 'itl_ms', **at):.3f}",
                f"{gain:.2f}x [{low:.2f}, {high:.2f}]" if k else "", f"{wall(results, 'tokens_per_step', **at):.2f}",
                f"{wall(results, 'ttft_ms', **at):.1f}"
            ])  # fmt: skip
    return markdown(heads, rows)


def _in_short(results: Results) -> list[str]:
    rows = results["wall"]["rows"]
    best = {r["workload"]: r for r in results["model"]["best"] if r["draft"] == "1.7B"}
    found = [f"{w} {r['gain']:.2f}x at k = {r['k']}" for w, r in best.items()]
    same = sum(r["identical"] for r in rows)
    walls = ", ".join(f"{e} {spread(results, e, 7)[1]:.1f}x" for e in ENTROPIES)
    return [
        f"- In short, simulated, 1.7B draft: {', '.join(found)}.",
        f"- In short, wall, demo pair, k = 7: {walls}; the same tokens in {same} of {len(rows)} runs.",
    ]


def _load(results: Results) -> str:
    cuts = statistics.quantiles((r["itl_ms"] for r in chosen(results, k=0)), n=10)
    return (
        f"The target alone took {cuts[1]:.1f} to {cuts[7]:.1f} ms per token (p20, p80): this machine's other load.\n"
        "A gain is the median of ratios, each of one prompt in one round: all ways serve it there within seconds of\n"
        "each other, in random order. The target alone is a bundle of its own (`--k 0`), without a draft to prefill."
    )


def report(results: Results) -> str:
    """All of it; modelled and measured figures stand in different columns everywhere."""
    sweep, quick = results["wall"]["sweep"], "; a quick sweep (`--quick`)" if results["wall"]["quick"] else ""
    return "\n".join(
        [
            *_INTRODUCTION, *_in_short(results), f"- modelled: {said(results['model'])}",
            f"- measured: {said(results['wall'])}{quick}; {sweep['prompts']} prompts a class, "
            f"{sweep['tokens']} tokens, {sweep['rounds']} rounds, medians", "",
            _claims(results), "", "## Modelled: both drafts on the article's hardware", "", _modelled(results), "",
            "The two assumed rates are no measurements: 0.60 stands for open prose, 0.95 for near-copying. For the",
            "0.6B no acceptance table is published, so only the assumed rates are shown.", "",
            _drafters(results), "", h100_sentence({"h100": results["model"]["h100"]}), "",
            f"![gain over k, simulated]({MODELLED})", "",
            "## Measured: the demo pair on this machine", "", _load(results), "",
            f"![gain over k, wall]({MEASURED})", "", _measured(results), "",
        ]
    )  # fmt: skip


def plots(results: Results) -> dict[str, str]:
    """The two k sweeps as SVG by file name, modelled and measured apart."""
    return {MODELLED: _modelled_plot(results), MEASURED: _measured_plot(results)}


def _modelled_plot(results: Results) -> str:
    named: dict[str, list[dict[str, Any]]] = {}
    for row in results["model"]["sweep"]:
        named.setdefault(f"{row['workload']}, {row['draft']}", []).append(row)
    series = []
    for number, ((name, rows), colour) in enumerate(zip(named.items(), COLOURS, strict=False)):
        points = tuple((r["k"], r["gain"]) for r in rows)
        beside = 0.06 * (number - (len(named) - 1) / 2)
        bands = tuple((r["k"] + beside, r["gain_low"], r["gain_high"]) for r in rows if r["k"])
        series.append(Series(name.replace("assumed rate", "a rate assumed by us"), colour, points, bands, marks=True))
    title = "Simulated gain, eight Trainium2 chips, batch 4, with its band"
    return lines(Axes(title, _K, "times the target alone", 620, 320, whole=True), series)


def _measured_plot(results: Results) -> str:
    series = []
    for number, (draft, entropy) in enumerate((d, e) for d in ("draft", "draft_small") for e in ENTROPIES):
        found = {k: spread(results, entropy, k, draft=draft) for k in swept(results, draft)}
        points = tuple((k, gain) for k, (_, gain, _) in found.items())
        bands = tuple((k + 0.06 * (number - 1.5), low, high) for k, (low, _, high) in found.items())
        # the small draft was measured at few k, so its line is no curve
        few = draft == "draft_small"
        series.append(Series(f"{entropy} prompts, {draft}", COLOURS[number], points, bands, dashed=few, marks=True))
    title = "Wall gain of the demo pair, p20 to p80 (stand-in models, one CPU thread)"
    return lines(Axes(title, _K, "times the target alone", 620, 320, whole=True), series)
