"""The step of each drafter for Qwen3-32B in microseconds, all simulated.

step = launch + drafter passes + one target pass over k + 1 rows per sequence. Passes are simulated at `_BATCHES` and
`_KNOTS` and interpolated linearly. A pass that samples fewer tokens than it has rows counts sampling for all rows;
n-gram drafts have no pass. EAGLE-3 has the sizes of RedHatAI/Qwen3-32B-speculator.eagle3: a layer like the target's in
one launch with twice its inputs, `fc` over three hidden states, 32,000 ids. DFlash has those of
chutesai/Qwen3-32B-FP8-DFLASH: five layers over five hidden states, attention in three launches because its rows attend
the full block, and a QKV product for each layer's context. Matrices outside of the layers take the time to read them
from HBM, a Markov head the exchange and the reading of all candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from bench.kernels.cases import block_case
from bench.kernels.layer import BF16, CONFIGS, DFLASH, SLOTS, Shard, layers_case, mlp_case, prompt_cases
from bench.kernels.sampling import FP32
from bench.tune import passes
from bench.tune.passes import LNC
from compile.report import CAPACITY, rank_bytes
from compile.spec import BuildSpec
from model.logprobs import TOP
from trnspec.bundle.plan import make_plan

TARGET = "32B"
# largest number of rows of the decode kernels, and the batches and rows per sequence for which passes are simulated
MAX_ROWS, _BATCHES, _KNOTS = 128, (1, 4, 16, 64), (1, 8, 16, 32)
_EAGLE3_IDS, _EAGLE3_TAPS, _DFLASH_TAPS, _MARKOV_RANK = 32000, 3, 5, 256
MAX_K, _CORES_PER_CHIP, _MARKOV = 15, 8, "Markov"
# drafter: its kind, and the size of its Qwen3 if it is one
DRAFTERS = {
    "none": ("none", ""), "chain 1.7B": ("chain", "1.7B"), "chain 0.6B": ("chain", "0.6B"), "n-gram": ("ngram", ""),
    "parallel 0.6B": ("parallel", "0.6B"), "EAGLE-3": ("eagle3", ""), "DFlash": ("dflash", ""),
    "DFlash with a Markov head": ("dflash", _MARKOV),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The options of a build without k: a key of DRAFTERS, ranks, sequences, cores of a rank, FP8 weights."""

    drafter: str
    tp: int = 32
    batch: int = 4
    lnc: int = LNC
    fp8: bool = False

    @property
    def chips(self) -> float:
        """Trainium2 chips of the ranks."""
        return self.tp * self.lnc / _CORES_PER_CHIP

    @property
    def max_k(self) -> int:
        """The largest k whose passes fit the decode kernels."""
        rows = MAX_ROWS // self.batch
        known = range(min(MAX_K + 1, rows) if self.drafter != "none" else 1)
        return max(k for k in known if max(pass_rows(self.drafter, k), default=0) <= rows)

    @property
    def fits(self) -> bool:
        """Whether the plan of the build fits a rank's HBM; a draft other than a smaller Qwen3 counts as the 1.7B."""
        kind, size = DRAFTERS[self.drafter]
        draft = f"Qwen/Qwen3-{size if kind == 'chain' else '1.7B'}" if kind != "none" else ""
        return _rank_bytes(self.tp, self.batch, draft, self.fp8) <= CAPACITY * self.lnc / LNC


@cache
def _rank_bytes(tp: int, batch: int, draft: str, fp8: bool) -> int:
    """Bytes on a rank of two cores."""
    spec = BuildSpec(tp=tp, batch=batch, max_len=SLOTS, k="7" if draft else "0", draft=draft or BuildSpec.draft,
                     weights="fp8" if fp8 else BuildSpec.weights)  # fmt: skip
    return sum(rank_bytes(make_plan(spec.bundle)).values())


def _between(knots: Iterable[int], x: int, us: Callable[[int], float]) -> float:
    """us(x), interpolated linearly between the knots around x."""
    high = min(knot for knot in knots if knot >= x)
    if high == x:
        return us(x)
    low = max(knot for knot in knots if knot < x)
    return us(low) + (us(high) - us(low)) * (x - low) / (high - low)


def _at(setup: Setup, rows: int, us: Callable[[int, int], float]) -> float:
    """us(batch, rows), interpolated; a larger batch must fit the kernels with these rows."""
    batches = {batch for batch in _BATCHES if batch * rows <= MAX_ROWS}
    batches |= {setup.batch} if setup.batch > max(batches, default=0) else set()

    def at(batch: int) -> float:
        return _between({min(knot, MAX_ROWS // batch) for knot in _KNOTS}, rows, lambda knot: us(batch, knot))

    return _between(batches, setup.batch, at)


def pass_us(setup: Setup, model: str, rows: int, end: str = "nominal", noise: bool = True) -> float:
    """A pass of a Qwen3 over `rows` rows per sequence."""
    # embeddings, norms, head and drafts are bf16
    fp8 = setup.fp8 and model == TARGET

    def us(batch: int, rows: int) -> float:
        shard = Shard(model, setup.tp, batch, rows, fp8)
        # each embedding row is on one rank
        embedding = passes.collective_us(setup.tp, shard.rows * shard.config.hidden_size * BF16, end, setup.lnc)
        return embedding + passes.layers_us(shard, end, setup.lnc) + passes.head_us(shard, end, setup.lnc, noise)

    return _at(setup, rows, us)


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
    """Rows per sequence in each drafter pass of a step with k drafts, at first the verified ones for hidden states."""
    rows = {"chain": [2] + [1] * (k - 1), "parallel": [2 * k], "eagle3": [k + 1] + [1] * (k - 1), "dflash": [k + 1] * 2}
    return rows.get(DRAFTERS[drafter][0], []) if k else []


def step_us(setup: Setup, k: int, end: str = "nominal") -> float:
    """One step; k 0 is no speculation."""
    return passes.launch_us(end) + draft_us(setup, k, end) + pass_us(setup, TARGET, k + 1, end)


def read_share(setup: Setup, k: int) -> float:
    """The time to read the target's weights and caches from HBM, as a share of its pass over k + 1 rows."""
    shard = Shard(TARGET, setup.tp, setup.batch, k + 1, setup.fp8)
    config, layer = shard.config, layers_case(shard, 1, setup.lnc).cost().hbm_bytes
    size_bytes = config.num_hidden_layers * layer + config.vocab_size // setup.tp * config.hidden_size * BF16
    return passes.read_us(size_bytes, lnc=setup.lnc) / pass_us(setup, TARGET, k + 1)


def _eagle3_us(setup: Setup, rows: int, first: bool, end: str) -> float:
    """One pass; the first of a step projects the target's hidden states."""

    one, lnc = Shard(TARGET, setup.tp, 1, 1), setup.lnc
    hidden, heads, dim = one.config.hidden_size, one.heads, one.config.head_dim

    def us(batch: int, rows: int) -> float:
        shard = Shard(TARGET, setup.tp, batch, rows)
        inputs = (1 + first) * passes.collective_us(setup.tp, shard.rows * hidden * BF16, end, lnc)
        # its vocabulary differs from the target's, and so does its noise
        sampling = passes.sampling_us(replace(one, batch=batch), one.config.vocab_size, end, lnc)
        return passes.layers_us(shard, end, lnc, count=1) + inputs + sampling

    wider = (heads.heads_per_rank + 2 * heads.kv_per_rank) * dim * setup.tp
    features = wider + _EAGLE3_IDS + first * _EAGLE3_TAPS * hidden
    return _at(setup, rows, us) + passes.read_us(features * hidden * BF16 / setup.tp, end, lnc)


def _dflash_us(setup: Setup, k: int, end: str, markov: bool) -> float:
    """The context pass of k + 1 rows, then the block."""
    config, lnc = CONFIGS[f"Qwen/Qwen3-{DFLASH}"], setup.lnc
    hidden, layers = config.hidden_size, config.num_hidden_layers

    def us(batch: int, rows: int) -> float:
        shard = Shard(DFLASH, setup.tp, batch, rows)
        qkv, out = prompt_cases(shard, shard.rows, lnc)[1:]
        # the block's launches, with a core barrier and an all-reduce after each half; the context's product takes less
        launches = (qkv, block_case(shard, lnc), out, mlp_case(shard, lnc), qkv)
        layer = sum(passes.kernel_us(case, end) for case in launches)
        layer += 2 * passes.CHIPS[end].core_barrier_ns.value / 1e3 * (lnc > 1)
        layer += 2 * passes.collective_us(setup.tp, shard.rows * hidden * BF16, end, lnc)
        return layers * layer + passes.head_us(shard, end, lnc, noise=False)

    total = _at(setup, next(n for n in _KNOTS if n > k), us)
    total += passes.read_us(_DFLASH_TAPS * hidden**2 * BF16 / setup.tp, end, lnc)
    total += passes.collective_us(setup.tp, setup.batch * (k + 1) * hidden * BF16, end, lnc)
    if markov:
        total += passes.read_us(setup.batch * k * TOP * _MARKOV_RANK * BF16, end, lnc)
        total += passes.collective_us(setup.tp, setup.batch * k * 4 * TOP * FP32, end, lnc)
    return total
