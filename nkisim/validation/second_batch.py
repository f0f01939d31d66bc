"""Measured rows that were found after those of `operators.py`: no constant was fitted to them, but they are seen.

They are of the same two records, with the same conditions and the same reading of medians. Their sketches were
corrected once, by the record's counts of copies out of PSUM (`products.transposed_together`).
"""

from __future__ import annotations

from functools import partial

from validation.heads import Variant, grouped_attention, stored_attention
from validation.operators import attention_row, row
from validation.products import batched, normed_product, product, product_normed, transposed_left
from validation.rows import Row

TRANSPOSED_FIRST = Variant(block=1)
FOLDED = Variant(block=2, scaled=False, divided=False)
SPLIT = Variant(block=2, scaled=False, divided=False, split=True)
DIRECT = Variant(block=2, scaled=False, divided=False, split=True, peak=False, direct=True)

GROUPED: dict[str, tuple[float, Variant]] = {
    "values weighed at once": (10.6579, Variant()),
    "transposed first": (10.5204, TRANSPOSED_FIRST),
    "transposed first, scaled by exp": (9.6523, Variant(block=1, scaled=False)),
    "transposed first, sums divided": (8.6820, Variant(block=1, divided=False)),
    "scaled by exp, sums divided": (7.7904, Variant(block=1, scaled=False, divided=False)),
    "blocks of 2": (7.5276, FOLDED),
    "blocks of 4": (7.5470, Variant(block=4, scaled=False, divided=False)),
    "blocks of 8": (7.5448, Variant(block=8, scaled=False, divided=False)),
    "split scores": (7.1907, SPLIT),
    "split scores, no peak": (5.9949, Variant(block=2, scaled=False, divided=False, split=True, peak=False)),
    "powers from PSUM": (4.3109, DIRECT),
    "powers from PSUM, blocks of 1": (
        4.3752, Variant(block=1, scaled=False, divided=False, split=True, peak=False, direct=True)
    ),
    "powers from PSUM, blocks of 4": (
        4.7965, Variant(block=4, scaled=False, divided=False, split=True, peak=False, direct=True)
    ),
    "powers from PSUM, split values": (
        4.2878, Variant(2, False, False, split=True, split_values=True, peak=False, direct=True)
    ),
}  # fmt: skip
# the copies of scores out of PSUM by engine
COPIES = {"scalar": (3.7281, ("scalar",)), "vector": (3.9681, ("vector",)), "both": (4.2743, ("vector", "scalar"))}
# microseconds in fp32 and in bf16, by length
STORED = {512: (52.0, 48.0), 1024: (107.0, 96.0), 2048: (274.0, 260.0), 4096: (1137.0, 1035.0)}

LATER: tuple[Row, ...] = (
    *(row("grouped attention", name, ms, partial(grouped_attention, v)) for name, (ms, v) in GROUPED.items()),
    row("batched matmul and softmax", "8 row tiles", 3.8233, partial(batched, 8, True)),
    row("batched matmul and softmax", "32 row tiles", 3.7715, partial(batched, 32, True)),
    *(
        row("batched matmul and softmax", f"16 row tiles, copies on {name}", ms, partial(batched, 16, True, engines))
        for name, (ms, engines) in COPIES.items()
    ),
    row("residual, RMSNorm and matmul", "scaled before", 0.4953, partial(normed_product, False, False, True)),
    row("residual, RMSNorm and matmul", "scaled after", 0.4770, partial(normed_product, False, True, True)),
    row("residual, RMSNorm and matmul", "scaled after, split", 0.4013, partial(normed_product, True, True, True)),
    row("matmul, residual and RMSNorm", "stored at once", 0.9612, partial(product_normed, False, False)),
    row("matmul, residual and RMSNorm", "stored by parts", 1.0221, partial(product_normed, False, True)),
    row("matmul, residual and RMSNorm", "stored at once, split", 0.7722, partial(product_normed, True, False)),
    row(
        "left transposed matmul", "16 row tiles, split, chunks of 512", 3.6762, partial(transposed_left, 16, True, 512)
    ),
    row("fp32 matmul", "8 row tiles", 14.0214, partial(product, 8)),
    *(
        attention_row(
            f"attention, {length} x 128, scores stored, {dtype}", length, us, partial(stored_attention, length, dtype)
        )
        for length, times in STORED.items()
        for dtype, us in zip(("float32", "bfloat16"), times, strict=True)
    ),
)
