"""Microseconds of passes of Qwen3 on Trainium2, simulated from the kernels of a layer on nkisim's timeline.

A pass is embedding, layers (several per launch) with their all-reduces, head and sampling of one token per row; hidden
states for drafters are not counted. `end` selects the low, nominal or high end of the band of all uncertain constants.
Simulated times are cached in a file of the user's cache folder, named by a digest of the kernels, the simulator and the
sizes of the models.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import bench.kernels
import model.config
import nki_kernels
import nkisim
from bench.kernels.case import Case
from bench.kernels.layer import BF16, Shard, attention_case, head_case, layers_case, mlp_case
from bench.kernels.sampling import FP32, noise_arguments, sample_arguments
from nki_kernels.roofline import Cost
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import gumbel_noise_kernel
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from trnspec.bundle.spec import LAYERS

# physical cores of a rank
LNC = 2
# layers of the two launches that fit a line: 2 layers are up to 3 % off it, 12 layers at most 1.1 %
_LINE = (4, 6)
# an execution of a graph with a collective of 32 ranks on a trn2.48xlarge (foxl-ai/kiln, docs/neuron-notes.md)
_EXECUTION_US = 2500.0
# a row's largest value and its id
_ARGMAX_BYTES = 2 * FP32
# Trainium2 with every uncertain constant at one end of its band
CHIPS: dict[str, Chip] = {
    end: replace(TRN2, **{name: replace(c, value=c.at(end)) for name, c in TRN2.constants().items()})  # type: ignore
    for end in CASES
}


@cache
def cache_file() -> Path:
    """The cache file for the present sources."""
    folders = [Path(str(package.__file__)).parent for package in (nki_kernels, nkisim, bench.kernels)]
    sources = [Path(str(model.config.__file__)), *(f for folder in folders for f in sorted(folder.rglob("*.py")))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sources)).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "trnspec" / f"simulated-{digest[:16]}.json"


@cache
def _times() -> dict[str, dict[str, float]]:
    """Cached microseconds by kernel case and end of the band."""
    with suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        stored = json.loads(cache_file().read_text(encoding="utf-8"))
        return {name: {end: float(times[end]) for end in CASES} for name, times in stored.items()}
    return {}


def kernel_us(case: Case, end: str = "nominal") -> float:
    """One launch of a kernel."""
    times = _times()
    if case.full_name not in times:
        events = case.recorded().events
        times[case.full_name] = {at: schedule(events, CHIPS[at], band=False).latency_ns / 1e3 for at in CASES}
        # without a cache folder the next run simulates again
        with suppress(OSError):
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            partial_file = cache_file().with_suffix(f".{os.getpid()}")
            partial_file.write_text(json.dumps(times), encoding="utf-8")
            partial_file.replace(cache_file())
    return times[case.full_name][end]


def collective_us(ranks: int, size_bytes: float, end: str = "nominal") -> float:
    """One collective by nkisim's cost: start, hops between the ranks' chips, bandwidth."""
    return collective_ns(int(size_bytes), ranks, LNC, CHIPS[end].at("nominal")) / 1e3


def read_us(size_bytes: float, end: str = "nominal") -> float:
    """The time to read bytes from HBM with a rank's cores."""
    chip = CHIPS[end]
    rate = min(LNC * chip.dma_engines.value * chip.dma_bytes_per_ns.value, chip.hbm_bytes_per_ns.value)
    return size_bytes / rate / 1e3


def launch_us(end: str = "nominal") -> float:
    """One launch of a graph: 0.8 ms, AWS's figure for a host's dispatch; 2.5 ms at the high end of the band."""
    chip = CHIPS[end]
    return _EXECUTION_US if end == "high" else (chip.host_dispatch_ns.value + chip.launch_ns.value) / 1e3


def layers_us(shard: Shard, end: str = "nominal") -> float:
    """All layers with their all-reduces, `LAYERS` per launch, by a line through two launches."""
    few, many = (kernel_us(layers_case(shard, n, LNC, summed=shard.tp > 1), end) for n in _LINE)
    layer, number = (many - few) / (_LINE[1] - _LINE[0]), shard.config.num_hidden_layers
    return -(-number // LAYERS) * (few - _LINE[0] * layer) + number * layer


def layer_us(shard: Shard, end: str = "nominal", attention: tuple[Case, ...] = ()) -> float:
    """One layer in separate launches, by default of both halves; a core barrier and an all-reduce after each half."""
    parts = (*(attention or [attention_case(shard, LNC)]), mlp_case(shard, LNC))
    size_bytes = shard.rows * shard.config.hidden_size * BF16
    sums = collective_us(shard.tp, size_bytes, end) + CHIPS[end].core_barrier_ns.value / 1e3
    return sum(kernel_us(case, end) for case in parts) + 2 * sums


def sampling_us(rows: int, vocabulary: int, tp: int, end: str = "nominal", noise: bool = True) -> float:
    """One token per row: noise unless a previous pass computed it, the sample of each shard, one all-gather."""
    sizes, no_cost = (rows, vocabulary // tp), partial(Cost, 0, 0)
    parts = {coupled_sample_kernel: sample_arguments} | ({gumbel_noise_kernel: noise_arguments} if noise else {})
    cases = (Case("R{}-V{}".format(*sizes), kernel, partial(f, *sizes), no_cost, LNC) for kernel, f in parts.items())
    # (value, id) of every rank
    return sum(kernel_us(case, end) for case in cases) + collective_us(tp, tp * rows * _ARGMAX_BYTES, end)


def embedding_us(shard: Shard, end: str = "nominal") -> float:
    """The all-reduce of embedding rows; each row is on one rank."""
    return collective_us(shard.tp, shard.rows * shard.config.hidden_size * BF16, end)


def head_us(shard: Shard, end: str = "nominal", noise: bool = True) -> float:
    """The head and the sampling of a pass."""
    config = shard.config
    logits = kernel_us(head_case(shard.rows, config.hidden_size, config.vocab_size // shard.tp, LNC), end)
    return logits + sampling_us(shard.rows, config.vocab_size, shard.tp, end, noise)
