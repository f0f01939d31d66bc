"""Microseconds of passes of Qwen3 on Trainium2, simulated from the kernels of a layer on nkisim's timeline.

A pass is embedding, layers (several per launch) with their all-reduces, head and sampling of one token per row; hidden
states for drafters are not counted. A launch of L layers is extrapolated from one of `_LAYERS`: each further layer is
the time between the last all-reduces of the first two. `end` selects the low, nominal or high end of the band of all
uncertain constants. Simulated times are cached in a file of the user's cache folder, named by a digest of the kernels,
the simulator and the sizes of the models.
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
from bench.kernels.layer import BF16, Shard, head_case, layers_case
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
# layers of the launch that is simulated; the second one prefetches the third's weights, as all but the last one do
_LAYERS = 3
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
def _times() -> dict[str, list[float]]:
    """Cached microseconds of a kernel case and of one of its layers, by case and end of the band."""
    with suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        stored = json.loads(cache_file().read_text(encoding="utf-8"))
        return {name: [float(us), float(layer)] for name, (us, layer) in stored.items()}
    return {}


def case_us(case: Case, end: str = "nominal") -> list[float]:
    """One launch of a kernel, and one layer of a launch of several."""
    times, name = _times(), f"{case.full_name} {end}"
    if name not in times:
        # other processes simulate too
        times.update(_times.__wrapped__())
    if name not in times:
        events = case.recorded().events
        sums = [i for i, event in enumerate(events) if event.op == "all_reduce" and event.core == events[0].core]
        for at in ("nominal",) if end == "nominal" else ("low", "high"):
            timed = schedule(events, CHIPS[at], band=False)
            layer = timed.end[sums[3]] - timed.end[sums[1]] if sums else 0.0
            times[f"{case.full_name} {at}"] = [timed.latency_ns / 1e3, layer / 1e3]
        times.update(_times.__wrapped__())
        # without a cache folder the next run simulates again
        with suppress(OSError):
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            partial_file = cache_file().with_suffix(f".{os.getpid()}")
            partial_file.write_text(json.dumps(times), encoding="utf-8")
            partial_file.replace(cache_file())
    return times[name]


def kernel_us(case: Case, end: str = "nominal") -> float:
    """One launch of a kernel."""
    return case_us(case, end)[0]


def collective_us(ranks: int, size_bytes: float, end: str = "nominal", lnc: int = LNC) -> float:
    """One collective by nkisim's cost: start, hops between the ranks' chips, bandwidth."""
    return collective_ns(int(size_bytes), ranks, lnc, CHIPS[end].at("nominal")) / 1e3


def read_us(size_bytes: float, end: str = "nominal", lnc: int = LNC) -> float:
    """The time to read bytes from HBM with a rank's cores."""
    chip = CHIPS[end]
    rate = min(lnc * chip.dma_engines.value * chip.dma_bytes_per_ns.value, chip.hbm_bytes_per_ns.value)
    return size_bytes / rate / 1e3


def launch_us(end: str = "nominal") -> float:
    """One launch of a graph: 0.8 ms, AWS's figure for a host's dispatch; 2.5 ms at the high end of the band."""
    return _EXECUTION_US if end == "high" else (CHIPS[end].host_dispatch_ns.value + CHIPS[end].launch_ns.value) / 1e3


def layers_us(shard: Shard, end: str = "nominal", lnc: int = LNC, count: int = 0) -> float:
    """`count` layers (default: all) with their all-reduces, `LAYERS` per launch."""
    several, layer = case_us(layers_case(shard, _LAYERS, lnc), end)
    count = count or shard.config.num_hidden_layers
    return -(-count // LAYERS) * (several - _LAYERS * layer) + count * layer


def sampling_us(shard: Shard, vocabulary: int, end: str = "nominal", lnc: int = LNC, noise: bool = True) -> float:
    """One token per row: noise unless a previous pass computed it, the sample of each shard, one all-gather."""
    sizes, no_cost = (shard.rows, vocabulary // shard.tp), partial(Cost, 0, 0)
    parts = {coupled_sample_kernel: sample_arguments} | ({gumbel_noise_kernel: noise_arguments} if noise else {})
    cases = (Case("R{}-V{}".format(*sizes), kernel, partial(f, *sizes), no_cost, lnc) for kernel, f in parts.items())
    # (value, id) of every rank
    exchange = collective_us(shard.tp, shard.tp * shard.rows * _ARGMAX_BYTES, end, lnc)
    return sum(kernel_us(case, end) for case in cases) + exchange


def head_us(shard: Shard, end: str = "nominal", lnc: int = LNC, noise: bool = True) -> float:
    """The head and the sampling of a pass; the head as at tp 32 for 32 rows and the time to read more (3 % off)."""
    hidden, ids = shard.config.hidden_size, shard.config.vocab_size
    few = ids // 32
    more = read_us((ids // shard.tp - few) * hidden * BF16, end, lnc)
    return kernel_us(head_case(32, hidden, few, lnc), end) + more + sampling_us(shard, ids, end, lnc, noise)
