"""How long a pass takes: the kernels of a layer on nkisim's timeline, all-reduces by its law, head and sampling.

Every time is simulated. Where both cores of a rank have stored parts of a half's result, they join before the sum over
the ranks. Layers are in launches of several, as in a build by default; the taps of a drafter, which end launches, are
not in it. A pass is all layers, the head, which streams its vocabulary shard at the rate that the rank's cores draw,
and the drawing of one token per row (noise, choice, and one exchange between the ranks of the head). The embedding's
rows are not in it. Attention is the fused kernel, or, where the rows of a block see each other, the three that a graph
then has; norms, rotations and additions between these are not in it. A step, one graph of several passes, is launched
once: `launch_us`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import nkisim
from bench.kernels.case import Case
from bench.kernels.cases import block_case
from bench.kernels.layer import BF16, Shard, attention_case, layers_case, mlp_case, prompt_cases
from bench.kernels.sampling import FP32, draw_arguments, noise_arguments
from model.nki.fused_layer import launched
from nki_kernels import roofline
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import gumbel_noise_kernel
from nkisim.isa import core_barrier
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from trnspec.bundle.spec import LAYERS

MOST_ROWS = 128
_KNOTS = (1, 2, 8, 16)
# bytes of a row's winner, its value and its id
_WINNER = 2 * FP32
# the kernels of a layer's attention: queries, keys and values, then attention alone, then the output projection
QKV, _BLOCK, _OUT = "qkv", "block", "out"
# those whose results are summed over the ranks, and launches of several layers, which sum inside
_SUMMED = ("attention", "mlp", _OUT)
_SEVERAL = {"4 layers": 4, "8 layers": 8}


@dataclass(frozen=True)
class Pass:
    """Microseconds of one pass by part, all simulated, and the bytes that a rank must read from HBM."""

    attention: float
    mlp: float
    collectives: float
    head: float
    sampling: float
    hbm_bytes: float
    # what launches of several layers take less than their halves and sums; below 0 if they take more
    saved: float = 0.0

    @property
    def total(self) -> float:
        """The whole pass in microseconds."""
        return self.attention + self.mlp + self.collectives - self.saved + self.head + self.sampling


def chip_at(case: str) -> Chip:
    """Trainium2 with every uncertain constant at the given end of its band."""
    changed: dict[str, Any] = {name: replace(c, value=c.at(case)) for name, c in TRN2.constants().items()}
    return replace(TRN2, **changed)


CHIPS = {case: chip_at(case) for case in CASES}


def _sampling_cases(rows: int, columns: int, lnc: int) -> tuple[Case, Case]:
    name = f"R{rows}-V{columns}"
    draw = partial(roofline.coupled_sample, rows, columns, itemsize=FP32)
    noise = partial(roofline.gumbel_noise, rows, columns)
    return (
        Case(name, gumbel_noise_kernel, partial(noise_arguments, rows, columns), noise, lnc),
        Case(name, coupled_sample_kernel, partial(draw_arguments, rows, columns), draw, lnc),
    )


def _case(shard: Shard, part: str, lnc: int) -> Case:
    if part in ("noise", "draw"):
        return _sampling_cases(shard.rows, shard.config.vocab_size // shard.tp, lnc)[part == "draw"]
    if part in (QKV, _OUT):
        return prompt_cases(shard, shard.rows, lnc)[1 + (part == _OUT)]
    if part in _SEVERAL:
        return layers_case(shard, _SEVERAL[part], lnc, summed=shard.tp > 1)
    return {"attention": attention_case, _BLOCK: block_case, "mlp": mlp_case}[part](shard, lnc)


@cache
def _events(shard: Shard, part: str, lnc: int) -> tuple[Any, ...]:
    """The events of a part's kernel, recorded once: chips differ only in their times."""
    case = _case(shard, part, lnc)
    events = tuple(case.recorded().events)
    if part not in _SUMMED or len({event.core for event in events}) == 1:
        return events
    return tuple(replace(case, kernel=_joining(case.kernel)).recorded().events)


def _joining(kernel: Any) -> Any:
    """A kernel at whose end the two cores join, before the sum over the ranks."""

    def joined(*arguments: Any) -> Any:
        out = kernel.fn(*arguments)
        core_barrier(data=out, cores=(0, 1))
        return out

    return nkisim.jit(joined)


@cache
def kernel_us(shard: Shard, part: str, lnc: int, chip: Chip) -> float:
    """One launch of a part's kernel."""
    return schedule(_events(shard, part, lnc), chip, band=False).latency_ns / 1e3


@cache
def launches_us(shard: Shard, lnc: int, chip: Chip) -> float:
    """All layers in launches of several, sums included: by a straight line through launches of 4 and of 8 layers."""
    four, eight = (kernel_us(shard, part, lnc, chip) for part in _SEVERAL)
    layer, counts = (eight - four) / 4, launched(shard.config.num_hidden_layers, LAYERS)
    return len(counts) * (four - 4 * layer) + sum(counts) * layer


@cache
def simulated_pass(
    shard: Shard, lnc: int, chip: Chip = TRN2, head_tp: int = 0, noise: bool = True, block: bool = False
) -> Pass:
    """One pass of a shard's model over its rows.

    `head_tp` ranks split the head, those of the layers if 0. Without `noise` the rows draw with that of another pass.
    The rows of a `block` see each other.
    """
    layers, hidden, head = shard.config.num_hidden_layers, shard.config.hidden_size, head_tp or shard.tp
    of_head = replace(shard, tp=head)
    of_attention = (QKV, _BLOCK, _OUT) if block else ("attention",)
    attention, mlp = (sum(kernel_us(shard, part, lnc, chip) for part in half) for half in (of_attention, ("mlp",)))
    drawn = sum(kernel_us(of_head, part, lnc, chip) for part in (("noise", "draw") if noise else ("draw",)))
    head_bytes = shard.config.vocab_size // head * hidden * BF16
    read = layers * sum(_case(shard, part, lnc).cost().hbm_bytes for part in (*of_attention, "mlp")) + head_bytes
    reduces = 2 * layers * collective_us(chip, shard.tp, lnc, shard.rows * hidden * BF16)
    drawn += collective_us(chip, head, lnc, shard.rows * _WINNER)
    halves = layers * (attention + mlp) + reduces
    saved = 0.0 if block else halves - launches_us(shard, lnc, chip)
    return Pass(layers * attention, layers * mlp, reduces, read_us(chip, lnc, head_bytes), drawn, read, saved)


def launch_us(chip: Chip) -> float:
    """One launch of a graph: the host's dispatch, published as 0.8 ms, and the device's start."""
    return (chip.host_dispatch_ns.value + chip.launch_ns.value) / 1e3


def read_us(chip: Chip, lnc: int, size_bytes: float) -> float:
    """Bytes of HBM at the rate that a rank's cores stream them."""
    rate = min(lnc * chip.dma_engines.value * chip.dma_bytes_per_ns.value, chip.hbm_bytes_per_ns.value)
    return size_bytes / rate / 1e3


def collective_us(chip: Chip, ranks: int, lnc: int, size_bytes: int) -> float:
    """One collective by nkisim's law: a start, the hops between the ranks' chips, and a rate."""
    return collective_ns(size_bytes, ranks, lnc, chip.at("nominal")) / 1e3


def longest(batch: int) -> int:
    """The most draft tokens whose rows the kernels take for this many sequences."""
    return min(_KNOTS[-1], MOST_ROWS // batch) - 1


def target_us(shard: Shard, lnc: int, chip: Chip = TRN2) -> float:
    """A pass over shard.candidates rows per sequence, between simulated points by a straight line."""
    rows = shard.candidates
    # sizes of a pass that are simulated: one row, two, and then far apart, for the time is nearly straight there
    knots = sorted({min(knot, longest(shard.batch) + 1) for knot in _KNOTS})
    above = next(knot for knot in knots if knot >= rows)
    high = simulated_pass(replace(shard, candidates=above), lnc, chip).total
    if above == rows:
        return high
    below = max(knot for knot in knots if knot < rows)
    low = simulated_pass(replace(shard, candidates=below), lnc, chip).total
    return low + (high - low) * (rows - below) / (above - below)
