"""`python -m bench.tune.first_token [LENGTH ...]`: simulated time to first token of Qwen3-32B at tp 32.

A prompt comes in chunks of up to 2048 rows. Each layer has the products of `prompt_matmul`, the writing of the rows'
blocks, prompt attention over the keys so far, and two all-reduces; each chunk one launch from the host, the last one a
head for one row. Norms before queries, rotations and the additions of residuals stay in the graph and are left out.
The host waits for the target's part alone where the draft is a chain or parallel, whose own part runs behind it. The
layers of EAGLE-3 and DFlash, which run in front of the first id, are left out too. The bound has the same products and
visible scores at the Tensor Engine's full rate, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cache

from bench.kernels.case import Case
from bench.kernels.cases import append_case, prompt_attention_case
from bench.kernels.layer import BF16, TARGET, attention_dims, prompt_cases
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each
from nki_kernels.roofline import Cost, prompt_attention
from nki_kernels.tiles import P
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2

CHUNK = 2048
LENGTHS = (1024, 8192, 32768)


@dataclass(frozen=True)
class FirstToken:
    """Milliseconds of a whole prompt, by part, and of its operations alone."""

    products: float = 0.0
    attention: float = 0.0
    collectives: float = 0.0
    head_and_host: float = 0.0
    bound: float = 0.0

    @property
    def total(self) -> float:
        """Milliseconds."""
        return self.products + self.attention + self.collectives + self.head_and_host


@cache
def _simulated(case: Case) -> float:
    """Milliseconds of a kernel."""
    return schedule(case.recorded().events, band=False).latency_ns / 1e6


def _bound(cost: Cost, lnc: int) -> float:
    """Milliseconds of the operations at the Tensor Engine's full rate."""
    return cost.flops / (lnc * TRN2.tensor_bf16_tflops.value * 1e9)


@cache
def _products(rows: int, lnc: int) -> tuple[float, float]:
    """Both of a layer's products for a chunk."""
    cases = prompt_cases(TARGET, rows, lnc)
    return sum(map(_simulated, cases)), sum(_bound(case.cost(), lnc) for case in cases)


def first_token(length: int, lnc: int) -> FirstToken:
    """A prompt of `length` rows on ranks of `lnc` cores."""
    config, d, n = TARGET.config, attention_dims(TARGET), TRN2.at("nominal")
    layers, rows = config.num_hidden_layers, min(length, CHUNK)
    products, of_products = _products(rows, lnc)
    attention, bound, chunks = 0.0, 0.0, length // rows
    for last in range(rows, length + 1, rows):
        # the block table is filled up to whole pieces
        slots = -(-last // 1024) * 1024
        attended = prompt_attention_case((rows, slots, d.heads, d.kv_heads, d.dim, BF16), lnc)
        attention += layers * (_simulated(append_case(rows, lnc)) + _simulated(attended))
        of_scores = _bound(prompt_attention(replace(d, batch=1, candidates=rows, slots=last)), lnc)
        bound += layers * (of_scores + of_products)
    reduce_ns = collective_ns(rows * config.hidden_size * BF16, TARGET.tp, lnc, n)
    head_ns = config.vocab_size // TARGET.tp * config.hidden_size * BF16 / (n.dma_engines * n.dma_bytes_per_ns * lnc)
    return FirstToken(
        chunks * layers * products,
        attention,
        chunks * layers * 2 * reduce_ns / 1e6,
        (head_ns + chunks * n.host_dispatch_ns) / 1e6,
        bound,
    )


def main(arguments: list[str]) -> None:
    """Print a row for each length and number of cores."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.first_token", description=__doc__)
    parser.add_argument("lengths", nargs="*", type=int, help=f"rows of a prompt (default: {LENGTHS})")
    lengths = parser.parse_args(arguments).lengths or LENGTHS
    for length in lengths:
        if length < P or length % P or (length > CHUNK and length % CHUNK):
            raise UserError(
                f"a prompt of {length} rows is no whole chunks: give a multiple of {P} up to {CHUNK}, or of {CHUNK}"
            )
    lines = []
    for length, lnc in each([(length, lnc) for length in lengths for lnc in (1, 2)], "prompts"):
        t = first_token(length, lnc)
        parts = (t.total, t.products, t.attention, t.collectives, t.head_and_host, t.bound)
        lines.append([str(length), str(lnc), *(f"{part:.1f}" for part in parts), f"{t.bound / t.total:.0%}"])
    heads = ["prompt", "cores a rank", "ms (simulated)", "products", "attention", "all-reduces", "head, host", "bound"]
    print(markdown([*heads, "share"], lines))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
