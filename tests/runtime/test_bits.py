"""The bits of a row: the same for every number of rows beside it, batch, row index and history.

Token identity follows from this, and does not depend on near-ties: the compiled passes that verify
1, 4, 7 or 15 drafts and the one of the target alone give equal logits, not close ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxlib.mlir import ir
from torch import Tensor, nn

from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from model.cache import Cache, Placement
from model.config import Qwen3Config, config_from_dict
from model.filters import Filters
from model.graph_spec import TensorSpec
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.sampling import Sampling
from model.window import MIN_TARGET_ROWS
from trnspec.runtime import columns, quicker, sums
from trnspec.runtime.pjrt import OF_STEPS, SAME_BITS

LENGTH, START = 256, 40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Pass(nn.Module):
    """A target pass with everything that it computes in sight: logits, drawn tokens, caches."""

    def __init__(self, model: Qwen3) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, caches: list[Cache], positions: Tensor, sampling: Sampling) -> tuple[Any, ...]:
        placement = Placement(positions, torch.arange(LENGTH, dtype=torch.int32, device=ids.device))
        x, *_ = self.model.hidden(ids, caches, placement)
        draws, passed = self.model(ids, caches, placement, sampling.draw(positions + 1))
        return self.model.logits(x), draws.merged().unflatten(0, ids.shape), passed.caches


def _config(**changes: int) -> Qwen3Config:
    sizes = {
        "vocab_size": 1000,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    rest = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
    return config_from_dict({**rest, "tie_word_embeddings": False, **sizes, **changes}, "test")


class Compiled:
    """One model, compiled for any number of rows."""

    def __init__(self, config: Qwen3Config, dtype: str) -> None:
        self.config, self.dtype = config, DTYPES[dtype]
        with torch.device("meta"):
            self.stage = Pass(Qwen3(config, Parallel(1, TracedOps(1)))).to(self.dtype)
        rng = np.random.default_rng(7)
        weights = {n: self._array(rng, p.shape) for n, p in self.stage.named_parameters()}
        # as the runtime holds them
        self.by_columns = {n for n, w in weights.items() if columns.turned(TensorSpec(n, w.shape, dtype))}
        self.weights = {n: w.T if n in self.by_columns else w for n, w in weights.items()}
        self._jit = jax.jit(lambda weights, *inputs: interop.call_torch(self._called, weights, inputs))
        self._executables: dict[tuple[int, ...], Any] = {}

    def _array(self, rng: np.random.Generator, shape: Any) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.15, shape), "float32" if self.dtype == torch.float32 else "bfloat16")

    def _called(self, weights: Any, inputs: Any) -> Any:
        weights = {n: w.T if n in self.by_columns else w for n, w in weights.items()}
        return torch.func.functional_call(self.stage, weights, tuple(inputs))

    def _run(self, *inputs: Any) -> Any:
        """The pass, compiled as the runtime compiles graphs."""
        rows = inputs[0].shape
        # as many as a step has, or as a chunk of a prompt
        of_step = OF_STEPS if rows[1] <= 16 else {}
        if rows not in self._executables:
            lowered = self._jit.lower(self.weights, *inputs)
            module = lowered.compiler_ir("stablehlo")
            plain = str(module)
            with module.context, ir.Location.unknown():
                sums.in_order(module)
                quicker.rewrite(module)
            assert str(module) != plain
            self._executables[rows] = lowered.compile(compiler_options=SAME_BITS | of_step)
        return self._executables[rows](self.weights, *inputs)

    def cache(self, batch: int, seed: int = 3) -> list[Cache]:
        shape = (1, self.config.num_key_value_heads, LENGTH, self.config.head_dim)
        rng = np.random.default_rng(seed)
        one = [Cache(self._array(rng, shape), self._array(rng, shape)) for _ in range(self.config.num_hidden_layers)]
        return [Cache(*(jnp.repeat(t, batch, 0) for t in c)) for c in one]

    def __call__(self, ids: np.ndarray, start: int, caches: list[Cache]) -> tuple[np.ndarray, np.ndarray, list[Cache]]:
        batch, count = ids.shape
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), (batch, 1))
        fill = lambda value, kind="float32": np.full(batch, value, kind)  # noqa: E731
        seeds, filters = np.tile(np.array([[5, 6]], np.int32), (batch, 1)), Filters(fill(50.0), fill(0.9), fill(0.01))
        sampling = Sampling(fill(0.8), seeds, filters)
        logits, drawn, caches = self._run(ids.astype(np.int32), caches, positions, sampling)
        return np.asarray(logits), np.asarray(drawn), caches


# each shape in the dtype that the other has not
CASES = [
    ({}, "fp32"),
    ({"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 160}, "bf16"),
]


@pytest.mark.parametrize(("changes", "dtype"), CASES, ids=["G4-D32-fp32", "G1-D64-bf16"])
def test_a_row_has_one_value_whatever_stands_beside_it(changes: dict, dtype: str) -> None:
    compiled = Compiled(_config(**changes), dtype)
    ids = np.random.default_rng(1).integers(0, 1000, (4, 32))
    logits, drawn, caches = compiled(ids, START, compiled.cache(4))
    for count in (MIN_TARGET_ROWS, 5, 8, 16):
        fewer, tokens, after = compiled(ids[:, :count], START, compiled.cache(4))
        assert np.array_equal(fewer, logits[:, :count])
        assert np.array_equal(tokens, drawn[:, :count])
        for one, other in zip(after, caches, strict=True):
            assert all(
                np.array_equal(a[:, :, : START + count], b[:, :, : START + count])
                for a, b in zip(one, other, strict=True)
            )
    for row in range(4):
        alone, tokens, _ = compiled(ids[row : row + 1, :8], START, compiled.cache(1))
        assert np.array_equal(alone, logits[row : row + 1, :8])
        assert np.array_equal(tokens, drawn[row : row + 1, :8])
    # the second half of the rows, verified after the first: the same rows at other row indices
    _, _, half = compiled(ids[:, :16], START, compiled.cache(4))
    assert np.array_equal(compiled(ids[:, 16:], START + 16, half)[0], logits[:, 16:])
    # a test that could not see a difference would prove nothing
    assert not np.array_equal(compiled(ids, START, compiled.cache(4, seed=4))[0], logits)
