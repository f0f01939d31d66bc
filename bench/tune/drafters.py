"""The cost and gain of a step with each drafter of a build, for Qwen3-32B; times simulated.

gain = tokens of a step / (launch + draft passes + one target pass over k + 1 rows), in steps of the target alone, each
with its launch. Tokens of a step are published or assumed; each row says which. A pass that draws fewer ids than it has
rows is billed for all of them. n-gram look-up has no pass.

EAGLE-3 has the sizes of RedHatAI/Qwen3-32B-speculator.eagle3: one layer like the target's, whose query, key and value
projections take two hidden states side by side, `fc` over three, and 32000 ids, at HBM's rate.

DFlash has the sizes of chutesai/Qwen3-32B-FP8-DFLASH: five layers of 32 query heads and an inner size of 9728, over
five states. Its rows see the whole block, which the fused kernel of a layer's attention does not serve: a block's
attention is three launches, and a layer's context one, the product with queries, keys and values. `fc` is billed at
HBM's rate, a Markov head with a collective for all candidates and the reading of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.kernels.layer import BF16, DFLASH, Shard
from bench.kernels.sampling import FP32
from bench.provenance import read_result
from bench.table import markdown
from bench.tune import choose, passes, published
from bench.tune.choose import TARGET, Setup
from bench.tune.regimes import REGIMES
from model.drafter import Drafter
from model.drafters.registry import DRAFTERS
from model.errors import UserError
from model.logprobs import TOP
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


LAYERS, MARKOV = "layers", "layers and Markov head"
_PARD = "no acceptance of PARD with a 32B target is published; "
_PARD_2 = "PARD-2 with Qwen3-8B, k = 15 (arXiv 2605.08632), taken over"
_EAGLE3 = "RedHatAI/Qwen3-32B-speculator.eagle3; " + published.SOURCE
_CHUTES = "card of chutesai/Qwen3-32B-FP8-DFLASH: Qwen3-32B-FP8, 8 requests at once"
_DEEPSPEC = "Qwen3-14B in DeepSpec's table 1 (T 1, 7 drafts), taken over; no such draft for the 32B is published"
_DEMO = "the demo pair's drafts, taken over"
_LOOK_UP = "one draft a step; gains of 2 to 4 are reported for suffix and n-gram look-up"
# three drafters of one recipe, and their tokens a step
_OF_RECIPE = (("eagle3", "head"), ("dflash", LAYERS), ("dflash", MARKOV))
_DEEPSPEC_14B = {"MT-Bench": (2.62, 3.10, 3.70), "HumanEval": (4.14, 4.59, 5.43), "GSM8K": (5.24, 5.41, 6.21)}
# the drafters of bench.acceptance, and the model of each that is billed
_OF_DEMO = {"chain": ("chain", "1.7B"), "parallel": ("parallel", "0.6B"), "dflash": ("dflash", LAYERS),
            "dspark": ("dflash", MARKOV), "eagle3": ("eagle3", "head"), "ngram": ("ngram", "")}  # fmt: skip
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
    Known("dflash", LAYERS, 15, 2.46, "ShareGPT", False, _CHUTES),
    *(
        Known(drafter, model, 7, tokens, workload, True, _DEEPSPEC)
        for workload, of_each in _DEEPSPEC_14B.items()
        for (drafter, model), tokens in zip(_OF_RECIPE, of_each, strict=True)
    ),
    Known("ngram", "", 7, 2.0, "edits", True, _LOOK_UP),
)  # fmt: skip


def of_demo(file: Path) -> list[Known]:
    """Tokens a step by k of the demo's drafters, as bench.acceptance wrote them; UserError if the file has none."""
    known = [
        Known(*_OF_DEMO[table["draft"]], int(k), tokens, table["name"], True, _DEMO)
        for table in read_result(file, "tables")["tables"] if table["draft"] in _OF_DEMO
        for k, tokens in table["tokens_per_step"].items()
    ]  # fmt: skip
    if not known:
        raise UserError(f"{file} has no table of {', '.join(_OF_DEMO)}; give a file of python -m bench.acceptance")
    return known


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
    own = Shard(DFLASH, setup.draft_tp, setup.batch, next(n for n in _ROWS if n > k))
    hidden, layers = own.config.hidden_size, own.config.num_hidden_layers
    total = passes.simulated_pass(own, setup.lnc, chip, setup.tp, noise=False, block=True).total
    total += _matrix_us(setup, chip, hidden, DFLASH_TAPS * hidden, setup.draft_tp)
    total += _gather_us(setup, chip, k + 1, hidden) + layers * passes.kernel_us(own, passes.QKV, setup.lnc, chip)
    if markov:
        total += passes.read_us(chip, setup.lnc, setup.batch * k * TOP * MARKOV_RANK * BF16)
        total += passes.collective_us(chip, setup.tp, setup.lnc, setup.batch * k * 4 * TOP * FP32)
    return total


def draft_us(known: Known, setup: Setup, chip: Chip) -> float:
    """Microseconds of a drafter's passes in a step."""
    if known.drafter == "dflash":
        return dflash_us(setup, chip, known.k, known.model == MARKOV)
    total = 0.0
    for number, made in enumerate(DRAFTERS[known.drafter].passes(known.k, known.k)):
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


def possible(setup: Setup, known: Sequence[Known] = KNOWN) -> list[Known]:
    """Those whose rows the kernels take for the setup's batch."""
    longest, most = passes.longest(setup.batch), passes.MOST_ROWS // setup.batch
    return [one for one in known if one.k <= longest and _rows(one) <= most]


def _rows(known: Known) -> int:
    """The rows of a sequence in the largest pass of its drafter."""
    return max((made.rows for made in DRAFTERS[known.drafter].passes(known.k, known.k)), default=0)


def row(known: Known, setup: Setup, chip: Chip | None = None) -> dict[str, Any]:
    """A drafter's step in steps of the target alone and its gain: with the chip's band, or on one chip."""
    chips = passes.CHIPS if chip is None else {"nominal": chip}
    found = {case: gain(known, setup, one) for case, one in chips.items()}
    gains = sorted(g for _, g in found.values())
    step, nominal = found["nominal"]
    about = asdict(known) | {"batch": setup.batch, "draft_tp": setup.draft_tp, "step": step, "gain": nominal}
    return about | {"gain_low": gains[0], "gain_high": gains[-1]}


def answers(
    setup: Setup, degrees: Sequence[int], batches: Sequence[int], known: Sequence[Known] = KNOWN
) -> list[dict[str, Any]]:
    """The largest gain for each workload and evidence, published tokens alone or assumed ones too; no drafts gain 1.

    By nkisim's law for every batch, whose constants have the band, and by the other regimes for the setup's.
    """
    best = []
    asked = [(name, chip, batch) for name, chip in REGIMES.items() for batch in batches]
    for regime, chip, batch in (one for one in asked if one[1] is TRN2 or one[2] == setup.batch):
        at, of_law = replace(setup, batch=batch), None if chip is TRN2 else chip
        rows = [
            row(one, replace(at, draft_tp=degree), of_law)
            for one in possible(at, known)
            for degree in (degrees if DRAFTERS[one.drafter].has_model else [at.draft_tp])
        ]
        for workload in dict.fromkeys(r["workload"] for r in rows):
            off = row(Known(Drafter.name, "", 0, 1.0, workload, False, "no drafts"), at, of_law)
            for evidence, assumed in (("published", (False,)), ("with assumptions", (False, True))):
                mine = [r for r in rows if r["workload"] == workload and r["assumed"] in assumed]
                if mine and assumed[-1] in {r["assumed"] for r in mine}:
                    fastest = max([off, *mine], key=lambda r: r["gain"])
                    best.append({"regime": regime, "evidence": evidence} | fastest)
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
    """A line for each workload, evidence, regime and batch."""
    heads = ["workload", "tokens a step", "collectives", "batch", "drafter", "k", "draft-tp",
             "gain (simulated) [band]", "off below, tokens a step"]  # fmt: skip
    lines = []
    for r in sorted(best, key=lambda r: (r["workload"], r["evidence"])):
        band = f" [{r['gain_low']:.2f}, {r['gain_high']:.2f}]" if r["gain_low"] < r["gain_high"] else ""
        name, ranks = f"{r['drafter']} {r['model']}".strip(), str(r["draft_tp"]) if r["model"] else ""
        about = [r["workload"], r["evidence"], r["regime"], str(r["batch"])]
        lines.append([*about, name, str(r["k"]), ranks, f"{r['gain']:.2f}{band}", f"{r['step']:.2f}"])
    return markdown(heads, lines)
