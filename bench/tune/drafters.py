"""The cost and gain of a step with each drafter of a build, for Qwen3-32B; times simulated.

gain = tokens of a step / (launch + draft passes + one target pass over k + 1 rows), in steps of the target alone, each
with its launch. Tokens of a step are published or assumed; each row says which. A pass that draws fewer ids than it has
rows is billed for all of them. n-gram look-up has no pass.

EAGLE-3 has the sizes of RedHatAI/Qwen3-32B-speculator.eagle3: one layer like the target's, whose query, key and value
projections take two hidden states side by side, `fc` over three, and 32000 ids, at HBM's rate.

DFlash has the sizes of chutesai/Qwen3-32B-FP8-DFLASH: five layers of 32 query heads and an inner size of 9728, over
five states. Its block's pass is billed as a chain's of as many rows, its context at HBM's rate. A Markov head is billed
with a collective for all candidates and the reading of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.kernels.layer import BF16, DFLASH, Shard
from bench.kernels.sampling import FP32
from bench.table import markdown
from bench.tune import choose, passes, published
from bench.tune.choose import TARGET, Setup
from bench.tune.regimes import REGIMES
from model.drafters.registry import KINDS
from model.scores import TOP
from nkisim.timeline.chip import Chip
from nkisim.timeline.trn2 import TRN2

EAGLE3_IDS, TAPS = 32000, 3
# of the context; a Markov head's rank, and its candidates of a draft
DFLASH_TAPS, MARKOV_RANK = 5, 256
# rows whose kernels are simulated: others are billed as the next of them
_ROWS = (1, 2, 8, 16)


@dataclass(frozen=True)
class Known:
    """Tokens of a step of k drafts for a drafter and the size of its model, and the number's source."""

    drafter: str
    model: str
    k: int
    tokens: float
    workload: str
    assumed: bool
    source: str


MARKOV = "layers and Markov head"
_PARD = "no acceptance of PARD with a 32B target is published; "
_PARD_2 = "PARD-2 with Qwen3-8B, k = 15 (arXiv 2605.08632), taken over"
_EAGLE3 = "RedHatAI/Qwen3-32B-speculator.eagle3; " + published.SOURCE
_CHUTES = "card of chutesai/Qwen3-32B-FP8-DFLASH: Qwen3-32B-FP8, 8 requests at once"
_DEEPSPEC = "Qwen3-14B in DeepSpec's table 1 (T 1, 7 drafts), taken over; no such draft for the 32B is published"
_LOOK_UP = "one draft a step; gains of 2 to 4 are reported for suffix and n-gram look-up"
KNOWN = (
    *(
        Known("chain", "1.7B", k, tokens, "MT-Bench", False, published.SOURCE)
        for k, tokens in enumerate(published.MT_BENCH_LENGTHS, 1)
    ),
    *(
        Known("eagle3", "head", k, tokens, "MT-Bench", False, _EAGLE3)
        for k, tokens in enumerate(published.EAGLE3_MT_BENCH_LENGTHS, 1)
    ),
    Known("parallel", "0.6B", 3, 2.4, "MT-Bench", True, _PARD + "between a chain's 2.80 of 1.7B and less of 0.6B"),
    Known("parallel", "0.6B", 7, 3.0, "MT-Bench", True, _PARD + "the low end of what is assumed"),
    Known("parallel", "0.6B", 7, 3.4, "MT-Bench", True, _PARD + "the high end of what is assumed"),
    Known("parallel", "0.6B", 15, 4.02, "MT-Bench", True, _PARD_2),
    Known("dflash", "layers", 15, 2.46, "ShareGPT", False, _CHUTES),
    *(
        Known(drafter, model, 7, tokens, workload, True, _DEEPSPEC)
        for workload, of_each in (("MT-Bench", (2.62, 3.10, 3.70)), ("GSM8K", (5.24, 5.41, 6.21)))
        for (drafter, model), tokens in zip(
            (("eagle3", "head"), ("dflash", "layers"), ("dflash", MARKOV)), of_each, strict=True
        )
    ),
    Known("ngram", "", 7, 2.0, "edits", True, _LOOK_UP),
)  # fmt: skip


def _target_pass(setup: Setup, chip: Chip, rows: int, noise: bool = True) -> passes.Pass:
    """The target's own pass on the ranks of the draft, over at least this number of rows; all ranks split its head."""
    billed = next(n for n in _ROWS if n >= rows)
    shard = Shard(TARGET, setup.draft_tp, setup.batch, billed)
    return passes.simulated_pass(shard, setup.lnc, chip, setup.tp, noise)


def _matrix_us(setup: Setup, chip: Chip, features: int, inputs: int, ranks: int) -> float:
    """A rank's part of a matrix from HBM."""
    return passes.read_us(chip, setup.lnc, features * inputs * BF16 / ranks)


def _gather_us(setup: Setup, chip: Chip, rows: int, size: int) -> float:
    """An all-gather of rows of each sequence."""
    return passes.collective_us(chip, setup.draft_tp, setup.lnc, setup.batch * rows * size * BF16)


def eagle3_us(setup: Setup, chip: Chip, rows: int, first: bool) -> float:
    """A pass of an EAGLE-3 head, which draws one id; the first of a step takes the target's states in."""
    own = Shard(TARGET, setup.draft_tp, setup.batch, 1)
    hidden, heads, dim = own.config.hidden_size, own.heads, own.config.head_dim
    like = _target_pass(setup, chip, rows)
    layer = (like.attention + like.mlp + like.collectives) / own.config.num_hidden_layers
    wider = (heads.heads_per_rank + 2 * heads.kv_per_rank) * dim * setup.draft_tp
    total = layer + _matrix_us(setup, chip, wider, hidden, setup.draft_tp) + _gather_us(setup, chip, rows, hidden)
    if first:
        total += _matrix_us(setup, chip, hidden, TAPS * hidden, setup.draft_tp) + _gather_us(setup, chip, rows, hidden)
    # its ids are its own, and so is their noise
    return total + _matrix_us(setup, chip, EAGLE3_IDS, hidden, setup.tp) + _target_pass(setup, chip, 1).sampling


def dflash_us(setup: Setup, chip: Chip, k: int, markov: bool) -> float:
    """The context of k + 1 rows, then the block."""
    config, billed = Shard(DFLASH, setup.draft_tp, setup.batch, 1).config, next(n for n in _ROWS if n > k)
    hidden, width = config.hidden_size, 2 * config.head_dim * max(config.num_key_value_heads, setup.draft_tp)
    total = choose.draft_pass(replace(setup, draft=DFLASH), chip, billed).total
    total += _matrix_us(setup, chip, hidden, DFLASH_TAPS * hidden, setup.draft_tp) + _gather_us(
        setup, chip, k + 1, hidden
    )
    total += config.num_hidden_layers * _matrix_us(setup, chip, width, hidden, setup.draft_tp)
    if markov:
        total += passes.read_us(chip, setup.lnc, setup.batch * k * TOP * MARKOV_RANK * BF16)
        total += passes.collective_us(chip, setup.tp, setup.lnc, setup.batch * k * 4 * TOP * FP32)
    return total


def draft_us(known: Known, setup: Setup, chip: Chip) -> float:
    """Microseconds of a drafter's passes in a step."""
    if known.drafter == "dflash":
        return dflash_us(setup, chip, known.k, known.model == MARKOV)
    total = 0.0
    for number, made in enumerate(KINDS[known.drafter].passes(known.k, known.k)):
        if known.drafter == "eagle3":
            total += eagle3_us(setup, chip, made.rows, first=not number)
        else:
            took = choose.draft_pass(replace(setup, draft=known.model), chip, made.rows)
            total += took.total if made.drawn else took.total - took.head - took.sampling
    return total


def gain(known: Known, setup: Setup, chip: Chip) -> tuple[float, float]:
    """A step in steps of the target alone, each with its launch, and its tokens over them."""
    latency = choose.Simulated(chip)
    one = latency.launch() + latency.target(setup, 1)
    step = (latency.launch() + latency.target(setup, known.k + 1) + draft_us(known, setup, chip)) / one
    return step, known.tokens / step


def possible(setup: Setup) -> list[Known]:
    """Those whose rows the kernels take for the setup's batch."""
    return [known for known in KNOWN if known.k <= passes.longest(setup.batch)]


def row(known: Known, setup: Setup, chip: Chip | None = None) -> dict[str, Any]:
    """A drafter's step in steps of the target alone and its gain: with the chip's band, or on one chip."""
    chips = passes.CHIPS if chip is None else {"nominal": chip}
    found = {case: gain(known, setup, one) for case, one in chips.items()}
    gains = sorted(g for _, g in found.values())
    step, nominal = found["nominal"]
    about = asdict(known) | {"draft_tp": setup.draft_tp, "step": step, "gain": nominal}
    return about | {"gain_low": gains[0], "gain_high": gains[-1]}


def answers(setup: Setup, degrees: Sequence[int]) -> list[dict[str, Any]]:
    """The largest gain for each workload, regime and evidence: published tokens alone, or assumed ones too."""
    setups, best = [replace(setup, draft_tp=degree) for degree in degrees], []
    # nkisim's own law: its constants have the band
    chips = {name: None if chip is TRN2 else chip for name, chip in REGIMES.items()}
    for regime, chip in chips.items():
        rows = [
            row(known, s, chip)
            for known in possible(setup)
            for s in (setups if KINDS[known.drafter].has_model else [setup])
        ]
        for workload in dict.fromkeys(known.workload for known in KNOWN):
            for evidence, assumed in (("published", (False,)), ("with assumptions", (False, True))):
                mine = [r for r in rows if r["workload"] == workload and r["assumed"] in assumed]
                if mine:
                    best.append({"regime": regime, "evidence": evidence} | max(mine, key=lambda r: r["gain"]))
    return best


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each known drafter."""
    step = "step, in steps of the target alone (simulated)"
    heads = ["drafter", "k", step, "tokens a step", "gain (simulated)", "tokens from"]
    return markdown(heads, [
        [f"{r['drafter']} {r['model']}".strip(), str(r["k"]), f"{r['step']:.2f}",
         f"{r['tokens']:.2f}{' (assumed)' if r['assumed'] else ''}",
         f"{r['gain']:.2f}x [{r['gain_low']:.2f}, {r['gain_high']:.2f}]", f"{r['workload']}: {r['source']}"]
        for r in rows
    ])  # fmt: skip


def answers_table(best: Sequence[dict[str, Any]]) -> str:
    """A line for each workload, evidence and regime."""
    heads = ["workload", "tokens a step", "collectives", "drafter", "k", "draft-tp", "gain (simulated) [band]"]
    lines = []
    for r in sorted(best, key=lambda r: (r["workload"], r["evidence"])):
        band = f" [{r['gain_low']:.2f}, {r['gain_high']:.2f}]" if r["gain_low"] < r["gain_high"] else ""
        name, ranks = f"{r['drafter']} {r['model']}".strip(), str(r["draft_tp"]) if r["model"] else ""
        lines.append([r["workload"], r["evidence"], r["regime"], name, str(r["k"]), ranks, f"{r['gain']:.2f}{band}"])
    return markdown(heads, lines)
