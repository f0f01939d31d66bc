"""`python -m bench.tune.first_token`: simulated time to the first token of Qwen3-32B at tp 32, two cores a rank.

Chunked prefill with up to 2048 rows: a layer's products, the append of keys and values, attention over the keys so far
and two all-reduces; one launch per chunk, the head for one row. qk-norm, RoPE, residual additions and the drafter's
layers are not counted. The bound is the products and visible scores at the Tensor Engine's peak rate.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from bench.kernels.cases import append_case, prompt_attention_case
from bench.kernels.layer import BF16, TARGET, attention_dims, head_case, prompt_cases
from bench.options import command
from bench.table import markdown
from bench.tune import passes
from bench.tune.passes import LNC
from model.drafter import MIN_TARGET_ROWS
from model.errors import run_cli
from model.progress import each
from nki_kernels.roofline import Cost, prompt_attention
from nkisim.timeline.trn2 import TRN2

CHUNK, LENGTHS = 2048, (1024, 8192, 32768)
_PARTS = ("products", "attention", "all-reduces", "head, launches")


def _bound_us(cost: Cost) -> float:
    return cost.flops / (LNC * TRN2.tensor_bf16_tflops.value * 1e6)


def first_token(length: int) -> tuple[dict[str, float], float]:
    """Milliseconds of a prompt by part, and of its operations at the peak rate."""
    config, dims = TARGET.config, attention_dims(TARGET)
    layers, rows = config.num_hidden_layers, min(length, CHUNK)
    chunks, products = length // rows, prompt_cases(TARGET, rows, LNC)
    attention, bound = 0.0, chunks * sum(_bound_us(case.cost()) for case in products)
    for last in range(rows, length + 1, rows):
        attended = prompt_attention_case((rows, last, dims.heads, dims.kv_heads, dims.dim, BF16), LNC)
        attention += passes.kernel_us(append_case(rows, LNC)) + passes.kernel_us(attended)
        bound += _bound_us(prompt_attention(replace(dims, batch=1, candidates=rows, slots=last)))
    collectives = 2 * chunks * passes.collective_us(TARGET.tp, rows * config.hidden_size * BF16)
    head = passes.kernel_us(head_case(MIN_TARGET_ROWS, config.hidden_size, config.vocab_size // TARGET.tp, LNC))
    us = (
        layers * chunks * sum(map(passes.kernel_us, products)), layers * attention, layers * collectives,
        head + chunks * passes.launch_us(),
    )  # fmt: skip
    return {part: time / 1e3 for part, time in zip(_PARTS, us, strict=True)}, layers * bound / 1e3


def main(arguments: list[str]) -> None:
    """Print a row for each length."""
    about = "Simulate the time to the first token of Qwen3-32B at tp 32 for prompts of several lengths."
    command("bench.tune.first_token", about, "").parse_args(arguments)
    lines = []
    for length in each(LENGTHS, "prompts"):
        parts, bound = first_token(length)
        total = sum(parts.values())
        cells = [f"{ms:.1f}" for ms in (total, *parts.values(), bound)]
        lines.append([str(length), *cells, f"{bound / total:.0%}"])
    print(markdown(["prompt", "ms (simulated)", *_PARTS, "bound", "bound / total"], lines))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
