"""The article's claims, each with what the model and the demo pair say about it; verdicts are computed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.reproduce.wall import pairs

Results = dict[str, Any]
# how far a wall figure on a shared machine may move before it counts as a difference
_NOISE = 0.10


@dataclass(frozen=True)
class Claim:
    """What was said and where; the functions give the two columns and the verdict from the results."""

    said: str
    modelled: Callable[[Results], str]
    measured: Callable[[Results], str]
    verdict: Callable[[Results], str]


def point(results: Results, workload: str, k: int, draft: str = "1.7B") -> dict[str, Any]:
    """A row of the modelled sweep."""
    rows = results["model"]["sweep"]
    found: dict[str, Any] = next(r for r in rows if (r["draft"], r["workload"], r["k"]) == (draft, workload, k))
    return found


def best(results: Results, workload: str, draft: str = "1.7B") -> dict[str, Any]:
    """The modelled optimum."""
    rows = results["model"]["best"]
    found: dict[str, Any] = next(r for r in rows if (r["draft"], r["workload"]) == (draft, workload))
    return found


def chosen(results: Results, **named: Any) -> list[dict[str, Any]]:
    """The rows of the demo pair that have these values."""
    return [r for r in results["wall"]["rows"] if all(r[name] == value for name, value in named.items())]


def wall(results: Results, figure: str, **named: Any) -> float:
    """The median over runs of a figure of the demo pair."""
    return statistics.median(r[figure] for r in chosen(results, **named))


def spread(results: Results, entropy: str, k: int, figure: str = "itl_ms", draft: str = "draft") -> list[float]:
    """p20, p50 and p80 of the target alone over k drafts; each ratio is of one prompt in one round, side by side."""
    alone = {(r["prompt"], r["round"]): r[figure] for r in chosen(results, k=0, entropy=entropy)}
    found = [alone[r["prompt"], r["round"]] / r[figure] for r in chosen(results, k=k, entropy=entropy, draft=draft)]
    cuts = statistics.quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
    return [cuts[1], statistics.median(found), cuts[7]]


def ratio(results: Results, entropy: str, k: int, figure: str = "itl_ms", draft: str = "draft") -> float:
    """The median of these ratios."""
    return spread(results, entropy, k, figure, draft)[1]


def swept(results: Results, draft: str = "draft") -> list[int]:
    """The k of the measured bundles of a draft."""
    return sorted({r["k"] for r in chosen(results, draft=draft)})


def _fastest(results: Results, entropy: str) -> str:
    """The best k, and the others whose gain is as good within the noise."""
    gains = {k: ratio(results, entropy, k) for k in swept(results)}
    best_k = max(gains, key=lambda k: gains[k])
    near = [str(k) for k, gain in gains.items() if gain > (1 - _NOISE) * gains[best_k] and k != best_k]
    return f"{entropy} {best_k}" + (f" (within 10 %: {', '.join(near)})" if near else "")


def _ms(row: dict[str, Any]) -> str:
    return f"{row['ms']:.2f} ms [{row['ms_low']:.2f}, {row['ms_high']:.2f}]"


def _gain(row: dict[str, Any]) -> str:
    return f"{row['gain']:.2f}x [{row['gain_low']:.2f}, {row['gain_high']:.2f}]"


def _ratios(results: Results, figure: str = "itl_ms") -> str:
    k = 7
    return ", ".join(f"{e} {ratio(results, e, k, figure):.2f}x" for e in ("structured", "open")) + f" (k = {k})"


def _accepted(results: Results, draft: str) -> float:
    steps = pairs(chosen(results, draft=draft, k=7))
    return sum(a for _, a in steps) / sum(d for d, _ in steps)


STRUCTURED, OPEN = "structured, assumed rate", "open, assumed rate"


def _baseline(results: Results) -> str:
    row = point(results, OPEN, 0)
    inside = row["ms_low"] <= 45 <= row["ms_high"]
    if inside:
        return "inside the band"
    return (
        f"not explained: {45 / row['ms']:.1f} times the kernels' time, so a step there is mostly something else, "
        "or a stream line was counted as a token"
    )


def _up_to_three(results: Results) -> str:
    row = best(results, STRUCTURED)
    holds = "reachable for the model" if row["gain_high"] >= 3 else "not reached by the model"
    return f"{holds} on the same prompt at rate {row['rate']:.2f}; the article divides two different prompts"


def _best_k(results: Results) -> str:
    ks = {row["workload"]: row["k"] for row in results["model"]["best"] if row["draft"] == "1.7B"}
    holds = "holds" if all(k == 7 for k in ks.values()) else "does not hold in general"
    return f"{holds}: the best k depends on the prompt, {', '.join(f'{k} for {w}' for w, k in ks.items())}"


def _fifteen(results: Results) -> str:
    loads = ("MT-Bench", "InstructCoder", OPEN, STRUCTURED)
    modelled = all(point(results, load, 15)["gain"] < point(results, load, 7)["gain"] for load in loads)
    said = "holds in the model" if modelled else "does not hold for every workload of the model"
    if 15 not in swept(results):
        return f"{said}; not measured"
    worse = {e: ratio(results, e, 15) < ratio(results, e, 7) for e in ("structured", "open")}
    return f"{said}; on the demo pair " + ", ".join(
        f"{'holds' if w else 'does not hold'} on {e} prompts" for e, w in worse.items()
    )


def _open(results: Results) -> str:
    modelled, measured = best(results, OPEN)["gain"], ratio(results, "open", 7)
    small = {"model": modelled < 1 + _NOISE, "demo pair": measured < 1 + _NOISE}
    holds = [name for name, value in small.items() if value]
    if len(holds) == len(small):
        return "holds"
    against = [name for name in small if name not in holds]
    return (
        f"does not hold for the {' and the '.join(against)}: {modelled:.2f}x and {measured:.2f}x; the model sees no "
        f"benefit below a rate of {results['model']['off_below']['1.7B']:.2f}"
    )


def _ttft(results: Results) -> str:
    found = [ratio(results, entropy, 7, "ttft_ms") for entropy in ("structured", "open")]
    same = all(abs(value - 1) < _NOISE for value in found)
    return (
        "holds within 10 % here, with the draft's prefill" if same else "does not hold here, with the draft's prefill"
    )


def _draft(results: Results) -> str:
    rows = results["model"]["other_draft"]
    needed = ", ".join(f"{r['needed_rate']:.2f} ({r['workload']})" for r in rows)
    wins = all(r["rate_60_percent_lower"]["ms"] > point_ms(results, r["workload"]) for r in rows)
    said = "holds if acceptance is 60 % lower" if wins else "does not hold even if acceptance is 60 % lower"
    return f"{said}; the 0.6B wins above a rate of {needed}, which nobody has published"


def point_ms(results: Results, workload: str) -> float:
    """The modelled optimum of the 1.7B in milliseconds."""
    return float(best(results, workload)["ms"])


def _both_drafts(results: Results) -> str:
    said = []
    for row in results["model"]["other_draft"]:
        small, large = _ms(row["rate_60_percent_lower"]), _ms(best(results, row["workload"]))
        said.append(f"{row['workload']}: 0.6B at 60 % less {small}, 1.7B {large}")
    return ", ".join(said)


def _same(results: Results) -> int:
    return sum(row["identical"] for row in results["wall"]["rows"])


def _identical(results: Results) -> str:
    differing = len(results["wall"]["rows"]) - _same(results)
    return (
        f"{differing} runs differ here" if differing else "token-identical here, demo pair, greedy"
    ) + "; the article's own chart shows texts of different length at temperature 0"


def _end_to_end(results: Results) -> str:
    both = [ratio(results, "structured", 7, figure) > 1 + _NOISE for figure in ("itl_ms", "e2e_ms")]
    return "contradicts the 15 ms claim, and here both fall together" if all(both) else "not shown here"


CLAIMS = (
    Claim("about 45 ms per token on open-ended prompts, with and without speculation",
          lambda r: f"target alone {_ms(point(r, OPEN, 0))}",
          lambda r: f"target alone {wall(r, 'itl_ms', k=0, entropy='open'):.2f} ms (demo pair)",
          _baseline),
    Claim("about 15 ms per token on structured prompts with speculation, k = 7",
          lambda r: f"at rate {point(r, STRUCTURED, 7)['rate']:.2f}: {_ms(point(r, STRUCTURED, 7))}",
          lambda r: f"{wall(r, 'itl_ms', k=7, entropy='structured', draft='draft'):.2f} ms (demo pair)",
          lambda r: "slower than the model's band" if point(r, STRUCTURED, 7)["ms_high"] < 15 else "inside the band"),
    Claim("up to 3x faster (45 / 15)", lambda r: f"same prompt: {_gain(best(r, STRUCTURED))}", _ratios, _up_to_three),
    Claim("k swept from 5 to 15, 7 is best", lambda r: ", ".join(
              f"{w}: k = {best(r, w)['k']}" for w in (OPEN, "InstructCoder", "MT-Bench", STRUCTURED)),
          lambda r: f"best of k = {', '.join(map(str, swept(r)))}: {_fastest(r, 'structured')}, {_fastest(r, 'open')}",
          _best_k),
    Claim("k = 15 (in the manifest) is worse than 7",
          lambda r: f"MT-Bench: {_gain(point(r, 'MT-Bench', 15))} against {_gain(point(r, 'MT-Bench', 7))} at 7",
          lambda r: ", ".join(f"k {k}: structured {ratio(r, 'structured', k):.2f}x, open {ratio(r, 'open', k):.2f}x"
                              for k in swept(r) if k in {7, 15}), _fifteen),
    Claim("no benefit on open-ended prompts", lambda r: f"rate 0.60: {_gain(best(r, OPEN))}",
          lambda r: f"{ratio(r, 'open', 7):.2f}x (k = 7)", _open),
    Claim("TTFT unchanged", lambda r: "not modelled", lambda r: _ratios(r, "ttft_ms"), _ttft),
    Claim("the 0.6B draft is accepted about 60 % less, the 1.7B is the better balance",
          _both_drafts,
          lambda r: f"accepted at k = 7: {_accepted(r, 'draft'):.0%}, small draft {_accepted(r, 'draft_small'):.0%}",
          _draft),
    Claim("no loss of quality, output identical", lambda r: "not modelled",
          lambda r: f"the same tokens in {_same(r)} of {len(r['wall']['rows'])} runs", _identical),
    Claim("gains appear end to end but not in inter-token latency", lambda r: "not modelled",
          lambda r: f"ITL {ratio(r, 'structured', 7):.2f}x, E2E {ratio(r, 'structured', 7, 'e2e_ms'):.2f}x, structured",
          _end_to_end),
    Claim("lower cost per output token (no figure given)",
          lambda r: f"cost is time at equal chips: {_gain(best(r, 'MT-Bench'))} on MT-Bench", lambda r: "no price here",
          lambda r: "follows from the gain, below the break-even rate it turns round: off below "
                    f"{r['model']['off_below']['1.7B']:.2f}"),
)  # fmt: skip
