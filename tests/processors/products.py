"""A child of test_products.py: for how many rows of a product a row has other bits than among six."""

from __future__ import annotations

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from model.graph_spec import TensorSpec
from trnspec.runtime.columns import turned
from trnspec.runtime.pjrt import OF_STEPS, SAME_BITS

# inputs and outputs; XLA has code of its own for small products of steps, of at most 128 by 128, and YNNPACK cuts the
# inputs of large ones
SHAPES = ((192, 1024), (192, 256), (512, 192), (128, 64), (32, 48))
FEW, ROWS = 48, (*range(2, 49), 60, 61, 64, 66, 76, 128, 140)


def _others(inputs: int, outputs: int, way: str) -> set[int]:
    rng = np.random.default_rng(0)
    rows, weight = (jnp.asarray(rng.normal(0, 1, (n, inputs)), "float32") for n in (ROWS[-1], outputs))
    by_columns = way == "by columns" or turned(TensorSpec("o_proj.weight", weight.shape, "fp32"))
    held = weight.T if by_columns else weight
    options = SAME_BITS | ({"xla_cpu_experimental_ynn_fusion_type": ""} if way == "oneDNN" else {})

    def product(some: jax.Array, more: dict[str, bool]) -> np.ndarray:
        lowered = jax.jit(lambda rows, held: rows @ (held if by_columns else held.T)).lower(some, held)
        return np.asarray(lowered.compile(compiler_options=options | more)(some, held))

    same = np.concatenate([product(rows[i : i + 6], {}) for i in range(0, FEW, 6)])
    ways = itertools.product(ROWS, [{}, OF_STEPS] if OF_STEPS else [{}])
    return {n for n, more in ways if not np.array_equal(product(rows[:n], more)[:FEW], same[:n])}


def main() -> None:
    """Print one JSON object: the numbers of rows. A word says how: as the runtime, by oneDNN, or weights by columns."""
    print(json.dumps({"others": sorted(set().union(*(_others(*shape, sys.argv[1]) for shape in SHAPES)))}))


if __name__ == "__main__":
    main()
