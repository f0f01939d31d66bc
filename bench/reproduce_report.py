"""The report on the article as markdown, from committed results alone."""

from __future__ import annotations

from typing import Any

from bench.reproduce_claims import CLAIMS, ratio, swept, wall
from bench.tune.text import h100_sentence, markdown

Results = dict[str, Any]
_INTRODUCTION = (
    "# The article's claims, one by one", "",
    "Made by `python -m bench.reproduce`; rerun it to measure again, or with `--report` to write this page again from",
    "the results beside it. Simulated figures are for Qwen3-32B on eight Trainium2 chips (tp 32, two cores a rank,",
    "four sequences) and were measured nowhere. Wall figures are of the demo pair, stand-ins of a few million",
    "parameters on one CPU thread, and say nothing about Qwen3-32B. [a, b] is the band of all uncertain constants.", "",
)  # fmt: skip


def _made(part: dict[str, Any]) -> str:
    how = "; a quick sweep (`--quick`)" if part.get("quick") else ""
    return f"source {part['source']}, commit {part['commit']}, {part['machine']}, {part['date']}{how}"


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


def _measured(results: Results) -> str:
    heads = ["draft", "k", "prompts", "target alone, ms per token (wall)", "with drafts, ms per token (wall)", "gain",
             "tokens a step", "TTFT alone, ms (wall)", "TTFT with drafts, ms (wall)"]  # fmt: skip
    rows = []
    for draft in dict.fromkeys(r["draft"] for r in results["wall"]["rows"]):
        for k in swept(results, draft):
            for entropy in ("structured", "open"):
                at = {"draft": draft, "bundle_k": k, "entropy": entropy}
                ms = [wall(results, "itl_ms", k=n, **at) for n in (0, k)]
                first = [wall(results, "ttft_ms", k=n, **at) for n in (0, k)]
                gain = f"{ratio(results, entropy, k, draft=draft):.2f}x"
                rows.append([
                    draft, str(k), entropy, *(f"{v:.3f}" for v in ms), gain,
                    f"{wall(results, 'tokens_per_step', k=k, **at):.2f}", *(f"{v:.2f}" for v in first)
                ])  # fmt: skip
    return markdown(heads, rows)


def _load(results: Results) -> str:
    alone = {
        (r["draft"], r["bundle_k"]): wall(results, "itl_ms", k=0, draft=r["draft"], bundle_k=r["bundle_k"])
        for r in results["wall"]["rows"]
    }
    low, high = min(alone.values()), max(alone.values())
    return (
        f"The target alone, the same work every time, took {low:.1f} to {high:.1f} ms per token beside the\n"
        "different bundles: that is the other load of this machine. Both ways of a bundle run in random order, so a\n"
        "gain compares like with like within that load; times of different rows don't."
    )


def report(results: Results) -> str:
    """All of it; modelled and measured figures stand in different columns everywhere."""
    sweep = results["wall"]["sweep"]
    return "\n".join(
        [
            *_INTRODUCTION, f"- modelled: {_made(results['model'])}",
            f"- measured: {_made(results['wall'])}; {sweep['prompts']} prompts a class, {sweep['tokens']} tokens, "
            f"{sweep['rounds']} rounds, medians", "",
            _claims(results), "", "## Modelled: both drafts on the article's hardware", "", _modelled(results), "",
            "The two assumed rates are no measurements: 0.60 stands for open prose, 0.95 for near-copying. For the",
            "0.6B no acceptance table is published, so only the assumed rates are shown.", "",
            h100_sentence({"h100": results["model"]["h100"]}), "",
            "## Measured: the demo pair on this machine", "", _load(results), "", _measured(results), "",
        ]
    )  # fmt: skip
