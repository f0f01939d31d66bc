"""What heads on the target's states cost in a step of Qwen3-32B: bytes at HBM's rate, collectives and draws, simulated.

EAGLE-3 has the sizes of RedHatAI/Qwen3-32B-speculator.eagle3: one layer as the target's, whose query, key and value
projections take two hidden states beside each other, `fc` over three, and 32000 ids. Medusa is billed with one residual
layer a head and one projection for all. Draws are billed as over the target's vocabulary, and rows as the next number
of them whose kernels are simulated.
"""

from __future__ import annotations

from bench.kernels.layer import BF16, Shard
from bench.tune import passes
from bench.tune.choose import TARGET, Setup
from nkisim.timeline.chip import Chip

EAGLE3_IDS, TAPS = 32000, 3
_ROWS = (1, 2, 8, 16)


def _target_pass(setup: Setup, chip: Chip, rows: int) -> passes.Pass:
    """The target's own pass on the ranks of the draft, over at least so many rows."""
    return passes.simulated_pass(Shard(TARGET, setup.draft_tp, setup.batch, _billed(rows)), setup.lnc, chip)


def _billed(rows: int) -> int:
    return next(n for n in _ROWS if n >= rows)


def _streamed_us(setup: Setup, chip: Chip, features: int, inputs: int) -> float:
    """A rank's part of a matrix."""
    return passes.read_us(chip, setup.lnc, features * inputs * BF16 / setup.draft_tp)


def _drawn_us(setup: Setup, chip: Chip, rows: int, ids: int, noise: bool) -> float:
    """A projection to so many ids on the ranks of the head, and the draws."""
    billed = Shard(TARGET, setup.draft_tp, setup.batch, _billed(rows))
    draws = passes.simulated_pass(billed, setup.lnc, chip, setup.head_tp, noise).sampling
    hidden = billed.config.hidden_size
    return draws + passes.read_us(chip, setup.lnc, ids * hidden * BF16 / setup.head_tp)


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
    total = layer + _streamed_us(setup, chip, wider, hidden) + _gather_us(setup, chip, rows, hidden)
    if first:
        total += _streamed_us(setup, chip, hidden, TAPS * hidden) + _gather_us(setup, chip, rows, hidden)
    # its ids are its own, and so is their noise
    return total + _drawn_us(setup, chip, 1, EAGLE3_IDS, noise=True)


def medusa_us(setup: Setup, chip: Chip, k: int) -> float:
    """All k heads of a step."""
    config = Shard(TARGET, setup.draft_tp, setup.batch, 1).config
    hidden = config.hidden_size
    blocks = _streamed_us(setup, chip, k * hidden, hidden) + _gather_us(setup, chip, k, hidden)
    return blocks + _drawn_us(setup, chip, k, config.vocab_size, noise=setup.head_tp != setup.tp)
