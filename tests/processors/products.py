"""A child of test_products.py: for how many rows of a product a row has other bits than among six."""

from __future__ import annotations

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np

from model.serving.pjrt import OF_STEPS, SAME_BITS

# inputs and outputs; XLA has code of its own for small products of steps, of at most 128 by 128
ROWS, SHAPES = 48, ((192, 256), (128, 64), (32, 48))


def _others(inputs: int, outputs: int) -> set[int]:
    rng = np.random.default_rng(0)
    rows, weight = (jnp.asarray(rng.normal(0, 1, s), "float32") for s in ((ROWS, inputs), (inputs, outputs)))

    def product(some: jax.Array, more: dict[str, bool]) -> np.ndarray:
        compiled = jax.jit(jnp.matmul).lower(some, weight).compile(compiler_options=SAME_BITS | more)
        return np.asarray(compiled(some, weight))

    same = np.concatenate([product(rows[i : i + 6], {}) for i in range(0, ROWS, 6)])
    ways = itertools.product(range(2, ROWS + 1), ({}, OF_STEPS))
    return {n for n, more in ways if not np.array_equal(product(rows[:n], more), same[:n])}


def main() -> None:
    """Print one JSON object: the numbers of rows."""
    print(json.dumps({"others": sorted(set().union(*(_others(*shape) for shape in SHAPES)))}))


if __name__ == "__main__":
    main()
