"""A row's bits do not depend on the number of rows, the graph or the row index.

Therefore speculation, batching and chunked prefill change no token, even if logits are numerically tied.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile.build import build
from compile.graph.torchax_seam import interop
from compile.spec import BuildSpec
from model.graph_io import zeros_of
from model.graph_key import GraphKey, Stage
from model.ops import ordered_sum
from tests.compile.tiny import spec, write_model
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import is_cache
from trnspec.runtime.xla import CPU_OPTIONS, XlaRunner

FEW = (2, 3, 5, 8, 17, 128, 512)
MOST = (*range(2, 50), 60, 61, 64, 66, 76, 96, 127, 128, 129, 140, 255, 256, 511, 512)
# (inputs, outputs); XLA and YNNPACK have special code for some shapes
SHAPES = ((192, 256), (512, 192), (128, 64), (32, 48), (1024, 64))


def _compiled(function: Any, *arguments: Any) -> np.ndarray:
    result = jax.jit(function).lower(*arguments).compile(compiler_options=CPU_OPTIONS)(*arguments)
    return np.asarray(result.astype(jnp.float32))


def _random(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


def _check_products(dtype: str, shapes: tuple[tuple[int, int], ...], counts: tuple[int, ...]) -> None:
    for inputs, outputs in shapes:
        x_RI, weight_OI = _random(0, (counts[-1], inputs), dtype), _random(1, (outputs, inputs), dtype)
        expected = _compiled(lambda x, w: x @ w.T, x_RI, weight_OI)
        for count in counts[:-1]:
            # the first rows, and the last ones, at other row indices
            assert np.array_equal(_compiled(lambda x, w: x @ w.T, x_RI[:count], weight_OI), expected[:count])
        assert np.array_equal(_compiled(lambda x, w: x @ w.T, x_RI[-6:], weight_OI), expected[-6:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(dtype: str) -> None:
    _check_products(dtype, SHAPES[:1], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_every_number_of_rows(dtype: str) -> None:
    _check_products(dtype, SHAPES, MOST)


@pytest.mark.parametrize("dim", [32, 64])
def test_attention_s_products(dim: int) -> None:
    """Scores and weighted values of a block of keys, for one sequence and for four."""
    q, k = _random(0, (4, 2, 512, dim), "float32"), _random(1, (4, 2, 128, dim), "float32")
    p = jnp.abs(_random(2, (4, 2, 512, 128), "float32"))
    for formula, rows, keys in (("bgrd,bgkd->bgrk", q, k), ("bgrk,bgkd->bgrd", p, k)):
        product = lambda x, y, f=formula: jnp.einsum(f, x, y)  # noqa: E731
        expected = _compiled(product, rows, keys)
        for count in (2, 5, 16, 33):
            assert np.array_equal(_compiled(product, rows[:, :, :count], keys), expected[:, :, :count])
        assert np.array_equal(_compiled(product, rows[1:2, :, 8:24], keys[1:2]), expected[1:2, :, 8:24])


@pytest.mark.parametrize("numbers", [8, 16, 32, 100, 192])
def test_an_ordered_sum_is_columns_of_16_then_halves(numbers: int) -> None:
    rng = np.random.default_rng(0)
    x_RN = (rng.normal(0, 1, (33, numbers)) * 2.0 ** rng.integers(0, 12, (33, numbers))).astype(np.float32)
    sums_RC = np.zeros((33, 16), np.float32)
    for column in range(0, numbers, 16):
        part = x_RN[:, column : column + 16]
        sums_RC[:, : part.shape[1]] += part
    for half in (8, 4, 2, 1):
        sums_RC = sums_RC[:, :half] + sums_RC[:, half:]
    for rows in (1, 2, 7, 33):
        actual = _compiled(lambda x: interop.call_torch(ordered_sum, x), jnp.asarray(x_RN[:rows]))
        assert np.array_equal(actual, sums_RC[:rows, 0])


LENGTH, BATCH, KS = 512, 4, (1, 2, 6, 15)
SIZES = {
    "G4-D32": {"hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "G1-D64": {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
}


@contextmanager
def _runner(folder: Path, dtype: str, sizes: dict[str, int]) -> Iterator[XlaRunner]:
    """A target with host-side drafts, so that the rows of a step can be any tokens."""
    write_model(folder / "target", 3, scale=0.15, intermediate_size=224, max_position_embeddings=LENGTH, **sizes)
    flags = {"drafter": "ngram", "k": ",".join(map(str, KS)), "batch": BATCH, "max_len": LENGTH, "dtype": dtype}
    plan = spec(folder, draft=BuildSpec.draft, chunks=(128, 512), blocks=40, **flags)
    with closing(XlaRunner(read_bundle(build(plan)))) as runner:
        yield runner


def _prefill(runner: XlaRunner, ids: np.ndarray, rows: int, end: int, first_block: int) -> np.ndarray:
    """Writes a prompt's first tokens to blocks from `first_block` on; the scores of its rows, (R, C), of chunks of 128
    those of their last rows."""
    scores = []
    for first in range(0, end, rows):
        keys = min(k for r, k in runner.bundle.spec.prompts if r == rows and k >= min(first + rows, LENGTH))
        stage = Stage.PREFILL if rows == 128 else Stage.PREFILL_LOGPROBS
        key = GraphKey(stage, KS[-1], keys, rows=rows)
        inputs = zeros_of(runner.graph(key).inputs)
        count = min(rows, end - first)
        inputs.input_ids[0, :count] = ids[first : first + count]
        inputs.positions[0], inputs.num_tokens[0] = first, count
        inputs.next_prompt_id[0] = ids[first + count] if first + count < len(ids) else -1
        inputs.block_table[0] = first_block + np.arange(inputs.block_table.shape[1])
        _neutral(inputs)
        scores.append(np.asarray(runner.run(key, inputs).scores)[0, :count])
    return np.concatenate(scores)


def _neutral(inputs: Any) -> None:
    inputs.allowed[:], inputs.bias_ids[:], inputs.penalties[:, 2], inputs.sampling_params[:, 1] = -1, -1, 1, 1


def _rows(runner: XlaRunner, first_block: int, count: int) -> list[np.ndarray]:
    """The keys and values of a sequence's first tokens in every layer, (G, S, D)."""
    caches = (np.asarray(runner._state[t.name]) for t in runner.bundle.plan.state if is_cache(t.name))
    blocks = slice(first_block, first_block + LENGTH // 128)
    return [np.swapaxes(pool[blocks], 0, 1).reshape(pool.shape[1], -1, pool.shape[3])[:, :count] for pool in caches]


def _check_equal(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sizes"), [("fp32", "G4-D32"), ("bf16", "G1-D64"), ("bf16", "G4-D32"), ("fp32", "G1-D64")]
)
def test_a_row_has_the_same_bits_in_every_graph(dtype: str, sizes: str, tmp_path: Path) -> None:
    """Keys and values of every layer, and log-probabilities: chunks of 512 and 128 rows, steps of 2 to 16."""
    ids = np.random.default_rng(1).integers(1, 64, LENGTH).astype(np.int32)
    starts = [130, 250, 300, 470]
    with _runner(tmp_path, dtype, SIZES[sizes]) as runner:
        scores = _prefill(runner, ids, 512, LENGTH, 1)
        expected = _rows(runner, 1, LENGTH)
        # the id of the first two columns is sampled after such a chunk
        assert np.array_equal(_prefill(runner, ids, 128, LENGTH, 5)[:, 2:], scores[127::128, 2:])
        _check_equal(_rows(runner, 5, LENGTH), expected)
        for k in (0, *KS):
            # each sequence has its rows at another position
            for slot, start in enumerate(starts):
                _prefill(runner, ids, 128, start, 9 + 4 * slot)
            verify = k == KS[-1]
            key = GraphKey(Stage.VERIFY if verify else Stage.STEP, k, LENGTH, filters=verify)
            inputs = zeros_of(runner.graph(key).inputs)
            for slot, start in enumerate(starts):
                inputs.input_ids[slot] = ids[start : start + k + 1]
                inputs.positions[slot] = start
                inputs.block_table[slot] = 9 + 4 * slot + np.arange(LENGTH // 128)
            inputs.sampling_params[:, 1] = 1
            if verify:
                _neutral(inputs)
            outputs = runner.run(key, inputs)
            for slot, start in enumerate(starts):
                actual, end = _rows(runner, 9 + 4 * slot, start + k + 1), start + k + 1
                _check_equal([c[:, start:end] for c in actual], [c[:, start:end] for c in expected])
                if verify and np.asarray(outputs.accepted_tokens)[slot, 0] == ids[start + 1]:
                    assert np.array_equal(np.asarray(outputs.scores)[slot, 0], scores[start])
        changed = ids.copy()
        changed[100] += 1
        assert not np.array_equal(_prefill(runner, changed % 64, 512, LENGTH, 1), scores), "bits show a difference"


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
def test_without_avx_512(instructions: str) -> None:
    """These tests in a process whose XLA may use fewer instructions."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_cpu_max_isa={instructions}", "DNNL_MAX_CPU_ISA": "SSE41"}
    chosen = "not without_avx and not every_number and not (every_graph and not G4-D32)"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"--xla_cpu_max_isa={instructions}" in done.stdout
