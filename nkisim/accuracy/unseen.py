"""Measured rows that no law or constant was read off: they were found after every constant had its value.

github.com/Jerry2423/kda-for-trainium, workspaces/*/benchmark.csv: trn2, one core, fp32, descriptors made on the host
(`--disable-dge`). Its medians are half of what the core took: they would need twice the peak of the Tensor Engine and
twice the rate of the DMA engines, and the engine time that the record quotes (9.43 ms for 24,576 passes of 456 columns
that take 384 ns each) is twice the median beside it. The rows here are twice the medians. Left out: rows with
`sequential_range` prefetch, which this sketch cannot say, and rows of a wrong result.

github.com/allenkchau/trainium-kernel-fusion, latency_throughput_20260307T073830Z.csv: trn2, one core, the median on
the core of attention kernels that keep their scores on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nkisim.accuracy.elementwise import adamw_by_columns, adamw_by_rows, mamba, rope_by_halves, rope_packed, silu
from nkisim.accuracy.products import attention, batched, normed_product, product, transposed_left
from nkisim.accuracy.rows import Row
from nkisim.event import Event

Kernel = Callable[[], list[Event]]

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


def _row(group: str, name: str, ms: float, kernel: Kernel) -> Row:
    return Row(f"{group}, {name}", group, 2000 * ms, (kernel,), "kda-for-trainium")


def _rows(group: str, name: str, times: dict[int, float], kernel: Callable[[int], list[Event]]) -> list[Row]:
    return [_row(group, name.format(size), ms, partial(kernel, size)) for size, ms in times.items()]


UNSEEN: tuple[Row, ...] = (
    *(_row("SiLU", f"{len(chunks)} chunks", ms, partial(silu, chunks)) for chunks, ms in SILU.items()),
    _row("SiLU", "8 chunks in place", 0.3971, partial(silu, (28672,) * 8, True)),
    _row("AdamW", "by rows", 0.6180, adamw_by_rows),
    *_rows("AdamW", "{} columns", ADAMW, adamw_by_columns),
    *_rows("RoPE", "by halves, {} columns", ROPE_HALVES, rope_by_halves),
    *_rows("RoPE", "packed by copies, {} columns", ROPE_COPIES, partial(rope_packed, by_product=False)),
    *_rows("RoPE", "packed by a product, {} columns", ROPE_PRODUCT, partial(rope_packed, by_product=True)),
    *_rows("Mamba", "{} positions", MAMBA, mamba),
    _row("Mamba", "512 positions, rows shared", 0.8397, partial(mamba, 512, True)),
    _row("Mamba", "512 positions, rows shared, product hoisted", 0.7278, partial(mamba, 512, True, True)),
    _row("left transposed matmul", "8 row tiles", 4.7274, partial(transposed_left, 8, False)),
    _row("left transposed matmul", "8 row tiles, split", 3.8699, partial(transposed_left, 8, True)),
    _row("left transposed matmul", "16 row tiles, split", 3.6338, partial(transposed_left, 16, True)),
    *_rows("batched matmul", "{} row tiles", BATCHED, batched),
    *_rows("batched matmul and softmax", "{} row tiles", SOFTMAX, partial(batched, softmax=True)),
    _row("RMSNorm and matmul", "scaled before", 0.4716, partial(normed_product, False, False)),
    _row("RMSNorm and matmul", "scaled after", 0.4733, partial(normed_product, False, True)),
    _row("RMSNorm and matmul", "scaled after, split", 0.3688, partial(normed_product, True, True)),
    *_rows("fp32 matmul", "{} row tiles", PRODUCT, product),
    *(
        Row(f"attention, {length} x 128, {dtype}", f"attention of {length}", us, (partial(attention, length, dtype),),
            "trainium-kernel-fusion")
        for length, times in ATTENTION.items()
        for dtype, us in zip(("float32", "bfloat16"), times, strict=True)
    ),
)  # fmt: skip
