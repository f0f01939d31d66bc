"""Measured rows that complete the two records of `operators.py` and `second_batch.py`: versions that had been left out.

Same conditions and the same reading of medians. They were run once; nothing was changed for them.
`excluded.py` lists what still has no row.
"""

from __future__ import annotations

from functools import partial

from validation.layers import adapted_product, batched_together, gated, gelu, gelu_product, softmax_in_psum
from validation.operators import row
from validation.rows import Row

Shape = tuple[int, int, int]

# microseconds by (K, M, N), in fp32 and in bf16: product and GELU apart, together by table, together by a sigmoid
GELU: dict[Shape, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    (128, 128, 512): ((37.0, 21.0, 26.0), (34.0, 19.0, 23.0)),
    (512, 256, 1024): ((59.0, 40.0, 53.0), (48.0, 28.0, 40.0)),
    (1024, 512, 2048): ((182.0, 150.0, 159.0), (82.0, 56.0, 96.0)),
    (2048, 1024, 4096): ((1173.0, 1074.0, 1297.0), (340.0, 288.0, 403.0)),
    (4096, 2048, 4096): ((4085.0, 4187.0, 4620.0), (1687.0, 1554.0, 1919.0)),
}


def _gelu_rows(shape: Shape, dtype: str, times: tuple[float, float, float]) -> list[Row]:
    """Integer microseconds, so that a pair differs by more than one, or by 2 %."""
    full = partial(gelu_product, shape, dtype)
    kernels = {
        "GELU apart": (partial(full, ""), partial(gelu, shape[1:], dtype)),
        "GELU by a table": (partial(full, "table"),),
        "GELU by a sigmoid": (partial(full, "sigmoid"),),
    }
    k, m, n = shape
    return [
        Row(f"matmul {k} x {m} x {n}, {name}, {dtype}", f"matmul {k} x {m} x {n} and GELU", us, launches,
            "trainium-kernel-fusion", spread=1 + max(0.02, 1 / us))
        for (name, launches), us in zip(kernels.items(), times, strict=True)
    ]  # fmt: skip


COMPLETING: tuple[Row, ...] = (
    row("fp32 matmul", "4 row tiles, split", 10.656, partial(adapted_product, 4, adapter="")),
    row("adapted matmul", "1 row tile, chunks of 128", 38.3562, partial(adapted_product, 1, 128, False)),
    row("adapted matmul", "4 row tiles", 14.8385, partial(adapted_product, 4, split=False)),
    row("adapted matmul", "4 row tiles, split", 11.3034, partial(adapted_product, 4)),
    row("adapted matmul", "4 row tiles, split, folded", 11.1756, partial(adapted_product, 4, adapter="folded")),
    row("gated layer", "1 row tile", 2.2079, partial(gated, 1)),
    row("gated layer", "1 row tile, split", 5.0669, partial(gated, 1, True, True)),
    row("gated layer", "1 row tile, down split", 2.1372, partial(gated, 1, False, True)),
    row("gated layer", "2 row tiles, down split", 2.1875, partial(gated, 2, False, True)),
    row("gated layer", "4 row tiles, down split", 2.0219, partial(gated, 4, False, True)),
    row("batched matmul", "2 batches together", 2.6099, partial(batched_together, 2)),
    row("batched matmul", "4 batches together", 2.9182, partial(batched_together, 4)),
    row("batched matmul and softmax", "16 row tiles, scores in PSUM", 6.6288, softmax_in_psum),
)
WITH_GELU: tuple[Row, ...] = tuple(
    each
    for shape, by_dtype in GELU.items()
    for dtype, times in zip(("float32", "bfloat16"), by_dtype, strict=True)
    for each in _gelu_rows(shape, dtype, times)
)
