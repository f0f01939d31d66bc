"""The step of each drafter for Qwen3-32B in microseconds, all simulated.

step = launch + drafter passes + one target pass over k + 1 rows per sequence. A pass that samples fewer tokens than it
has rows counts sampling for all rows; n-gram drafts have no pass. EAGLE-3 has the sizes of
RedHatAI/Qwen3-32B-speculator.eagle3: a layer like the target's with twice its inputs, `fc` over three hidden states,
32,000 ids. DFlash has those of chutesai/Qwen3-32B-FP8-DFLASH: five layers over five hidden states, attention in three
launches because its rows attend the full block, and a QKV product for each layer's context. Matrices outside of the
layers take the time to read them from HBM, a Markov head the exchange and the reading of all candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.kernels.cases import block_case
from bench.kernels.layer import BF16, DFLASH, Shard, prompt_cases
from bench.kernels.sampling import FP32
from bench.tune import passes
from bench.tune.passes import LNC
from model.logprobs import TOP

TARGET = "32B"
# largest number of rows of the decode kernels, and rows per sequence for which passes are simulated
MAX_ROWS, _KNOTS = 128, (1, 2, 8, 16, 32)
MAX_K = 15
_EAGLE3_IDS, _EAGLE3_TAPS, _DFLASH_TAPS, _MARKOV_RANK = 32000, 3, 5, 256
_CORES_PER_CHIP = 8
_MARKOV = "Markov"
# drafter: its kind, and the size of its Qwen3 if it is one
DRAFTERS = {
    "chain 1.7B": ("chain", "1.7B"),
    "chain 0.6B": ("chain", "0.6B"),
    "parallel 0.6B": ("parallel", "0.6B"),
    "EAGLE-3": ("eagle3", ""),
    "DFlash": ("dflash", ""),
    "DFlash with a Markov head": ("dflash", _MARKOV),
    "n-gram": ("ngram", ""),
}
# the rows of each pass of a model that drafts k; EAGLE-3's and DFlash's first pass has the verified rows
_PASSES: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda k: [2] + [1] * (k - 1), "parallel": lambda k: [2 * k], "eagle3": lambda k: [k + 1] + [1] * (k - 1),
    "dflash": lambda k: [k + 1] * 2,
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The options of a build without k: a key of DRAFTERS, ranks of two cores each, sequences."""

    drafter: str
    tp: int = 32
    batch: int = 4

    @property
    def chips(self) -> float:
        """Trainium2 chips of the ranks."""
        return self.tp * LNC / _CORES_PER_CHIP

    @property
    def max_k(self) -> int:
        """The largest k whose passes fit the decode kernels."""
        rows = MAX_ROWS // self.batch
        return max(k for k in range(min(MAX_K + 1, rows)) if max(pass_rows(self.drafter, k), default=0) <= rows)


def pass_us(setup: Setup, model: str, rows: int, end: str = "nominal", noise: bool = True) -> float:
    """A pass of a Qwen3 over `rows` rows per sequence, interpolated linearly between simulated numbers of rows."""
    knots = sorted({min(knot, MAX_ROWS // setup.batch) for knot in _KNOTS})
    above = next(n for n, knot in enumerate(knots) if knot >= rows)
    ends = knots[above - (knots[above] > rows) : above + 1]
    shards = [Shard(model, setup.tp, setup.batch, knot) for knot in ends]
    times = [
        passes.embedding_us(shard, end) + passes.layers_us(shard, end) + passes.head_us(shard, end, noise)
        for shard in shards
    ]
    return times[0] + (times[-1] - times[0]) * (rows - ends[0]) / max(1, ends[-1] - ends[0])


def draft_us(setup: Setup, k: int, end: str = "nominal") -> float:
    """The drafter's passes in a step with k drafts."""
    (kind, size), rows = DRAFTERS[setup.drafter], pass_rows(setup.drafter, k)
    if kind == "dflash":
        return _dflash_us(setup, k, end, size == _MARKOV) if k else 0.0
    if kind == "eagle3":
        return sum(_eagle3_us(setup, number, n == 0, end) for n, number in enumerate(rows))
    # drafts are sampled with the target's noise
    return sum(pass_us(setup, size, number, end, noise=False) for number in rows)


def pass_rows(drafter: str, k: int) -> list[int]:
    """Rows per sequence in each drafter pass of a step with k drafts."""
    kind, _ = DRAFTERS[drafter]
    return _PASSES[kind](k) if k and kind in _PASSES else []


def step_us(setup: Setup, k: int, end: str = "nominal") -> float:
    """One step; k 0 is no speculation."""
    return passes.launch_us(end) + draft_us(setup, k, end) + pass_us(setup, TARGET, k + 1, end)


def _eagle3_us(setup: Setup, rows: int, first: bool, end: str) -> float:
    """One pass; the first of a step projects the target's hidden states."""
    shard = Shard(TARGET, setup.tp, setup.batch, next(n for n in _KNOTS if n >= rows))
    hidden, heads, dim = shard.config.hidden_size, shard.heads, shard.config.head_dim
    wider = (heads.heads_per_rank + 2 * heads.kv_per_rank) * dim * setup.tp
    features = wider + _EAGLE3_IDS + first * _EAGLE3_TAPS * hidden
    total = passes.layer_us(shard, end) + passes.read_us(features * hidden * BF16 / setup.tp, end)
    total += (1 + first) * passes.collective_us(setup.tp, setup.batch * rows * hidden * BF16, end)
    # its vocabulary differs from the target's, and so does its noise
    return total + passes.sampling_us(setup.batch, shard.config.vocab_size, setup.tp, end)


def _dflash_us(setup: Setup, k: int, end: str, markov: bool) -> float:
    """The context pass of k + 1 rows, then the block."""
    shard = Shard(DFLASH, setup.tp, setup.batch, next(n for n in _KNOTS if n > k))
    hidden, layers = shard.config.hidden_size, shard.config.num_hidden_layers
    qkv, out = prompt_cases(shard, shard.rows, LNC)[1:]
    block = passes.layer_us(shard, end, (qkv, block_case(shard, LNC), out))
    total = layers * (block + passes.kernel_us(qkv, end)) + passes.head_us(shard, end, noise=False)
    total += passes.read_us(_DFLASH_TAPS * hidden**2 * BF16 / setup.tp, end)
    total += passes.collective_us(setup.tp, setup.batch * (k + 1) * hidden * BF16, end)
    if markov:
        total += passes.read_us(setup.batch * k * TOP * _MARKOV_RANK * BF16, end)
        total += passes.collective_us(setup.tp, setup.batch * k * 4 * TOP * FP32, end)
    return total
