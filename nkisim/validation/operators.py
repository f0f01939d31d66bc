"""Measured rows of operators that no constant was fitted to; laws were checked against them, so they are seen.

github.com/Jerry2423/kda-for-trainium, workspaces/*/benchmark.csv: trn2, one core, fp32, descriptors made on the host
(`--disable-dge`). Half of the record's samples are of runs that do nothing: where it prints a full distribution, the
least is 9.6 us, the median 962.5, the 90th percentile 1914.1, the mean 961.7. A median of such samples lies in the
middle of an empty run and a real one, so the core took twice the median less 10 us. The record's other figures agree:
24,576 passes of 456 columns used the Tensor Engine for 9.43 ms and had a median of 4.73, and busy shares, where the
record has them, times the core's time give the work of the engine. By them one median is of a real run (SiLU, 11
chunks): the Scalar Engine's 25 % of twice as much would be twice its work. Left out: rows with `sequential_range`
prefetch, which this sketch cannot say, rows that spilled or loaded twice, and rows of a wrong result.

github.com/allenkchau/trainium-kernel-fusion, latency_throughput_20260307T073830Z.csv: trn2, one core, the median on
the core of attention kernels that keep their scores on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nkisim.event import Event
from validation.elementwise import adamw_by_columns, adamw_by_rows, mamba, rope_by_halves, rope_packed, silu
from validation.products import attention, batched, normed_product, product, transposed_left
from validation.rows import SPREAD as ROW_SPREAD
from validation.rows import Row

Kernel = Callable[[], list[Event]]
EMPTY_RUN_US = 10.0
REAL_MEDIANS = frozenset({"11 chunks"})
# the largest over the least median of one kernel, where the record has repeats that differ by more than 2 %:
# products of 4.7274 to 5.0995 ms, batches of 2.862 to 3.1046, fp32 products of 13.29 to 13.776
REPEATS = {"left transposed matmul": 1.079, "batched matmul": 1.085, "fp32 matmul": 1.037}

SILU: dict[tuple[int, ...], float] = {
    (7168,) * 32: 0.3009, (3584,) * 64: 0.3001, (1792,) * 128: 0.2981, (1024,) * 224: 0.2940,
    (896,) * 256: 0.3105, (14336,) * 16: 0.3350, (*(21504,) * 10, 14336): 0.7729,
}  # fmt: skip
ADAMW = {
    512: 0.7768, 576: 0.5839, 608: 0.5860, 684: 0.6390, 768: 0.7517, 912: 0.5606, 1024: 0.5921, 1152: 0.6834,
    1216: 0.5601, 1368: 0.5825, 1536: 0.6515, 1824: 0.5474, 2304: 0.6105,
}  # fmt: skip
ROPE_HALVES = {512: 1.0335, 1024: 1.0350, 2048: 0.9445, 4096: 1.0223}
ROPE_COPIES = {256: 0.7335, 512: 0.7337, 1024: 0.7931, 2048: 0.7801, 4096: 0.7812}
ROPE_PRODUCT = {128: 0.6986, 256: 0.6870, 512: 0.6960}
MAMBA = {256: 0.7827, 448: 0.7814, 512: 0.7822, 896: 0.7961, 1024: 0.8495}
BATCHED = {1: 3.8477, 8: 3.4920, 16: 3.1046, 32: 2.0353}
SOFTMAX = {1: 4.5995, 16: 3.7460}
PRODUCT = {1: 15.8853, 2: 13.8084, 4: 13.3517}
# microseconds in fp32 and in bf16, by length
ATTENTION = {512: (31.0, 28.0), 1024: (69.0, 60.0), 2048: (215.0, 188.0), 4096: (839.0, 684.0)}


def row(group: str, name: str, ms: float, kernel: Kernel) -> Row:
    """A row of the first record: the core's median time, and how far repeats of one kernel differ."""
    us = 1000 * ms if name in REAL_MEDIANS else 2000 * ms - EMPTY_RUN_US
    return Row(f"{group}, {name}", group, us, (kernel,), "kda-for-trainium", spread=REPEATS.get(group, ROW_SPREAD))


def attention_row(name: str, length: int, us: float, kernel: Kernel) -> Row:
    """A row of the second record, whose times are integer microseconds."""
    return Row(name, f"attention of {length}", us, (kernel,), "trainium-kernel-fusion", spread=1 + max(0.02, 1 / us))


def _rows(group: str, name: str, times: dict[int, float], kernel: Callable[[int], list[Event]]) -> list[Row]:
    return [row(group, name.format(size), ms, partial(kernel, size)) for size, ms in times.items()]


OPERATORS: tuple[Row, ...] = (
    *(row("SiLU", f"{len(chunks)} chunks", ms, partial(silu, chunks)) for chunks, ms in SILU.items()),
    row("SiLU", "8 chunks in place", 0.3971, partial(silu, (28672,) * 8, True)),
    row("AdamW", "by rows", 0.6180, adamw_by_rows),
    *_rows("AdamW", "{} columns", ADAMW, adamw_by_columns),
    *_rows("RoPE", "by halves, {} columns", ROPE_HALVES, rope_by_halves),
    *_rows("RoPE", "packed by copies, {} columns", ROPE_COPIES, partial(rope_packed, by_product=False)),
    *_rows("RoPE", "packed by a product, {} columns", ROPE_PRODUCT, partial(rope_packed, by_product=True)),
    *_rows("Mamba", "{} positions", MAMBA, mamba),
    row("Mamba", "512 positions, rows shared", 0.8397, partial(mamba, 512, True)),
    row("Mamba", "512 positions, rows shared, product hoisted", 0.7278, partial(mamba, 512, True, True)),
    row("left transposed matmul", "8 row tiles", 4.7274, partial(transposed_left, 8, False)),
    row("left transposed matmul", "8 row tiles, split", 3.8699, partial(transposed_left, 8, True)),
    row("left transposed matmul", "16 row tiles, split", 3.6338, partial(transposed_left, 16, True)),
    *_rows("batched matmul", "{} row tiles", BATCHED, batched),
    *_rows("batched matmul and softmax", "{} row tiles", SOFTMAX, partial(batched, softmax=True)),
    row("RMSNorm and matmul", "scaled before", 0.4716, partial(normed_product, False, False)),
    row("RMSNorm and matmul", "scaled after", 0.4733, partial(normed_product, False, True)),
    row("RMSNorm and matmul", "scaled after, split", 0.3688, partial(normed_product, True, True)),
    *_rows("fp32 matmul", "{} row tiles", PRODUCT, product),
    *(
        attention_row(f"attention, {length} x 128, {dtype}", length, us, partial(attention, length, dtype))
        for length, times in ATTENTION.items()
        for dtype, us in zip(("float32", "bfloat16"), times, strict=True)
    ),
)
