"""Prompt attention: against its law in fp64, and the bits of a row, whatever chunk of a prompt it comes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import nki
import numpy as np
import pytest
import torch

from model.attention import verify_attention as torch_attention
from model.cache import Cache, Placement
from model.ops import EAGER
from nki_kernels import roofline
from nki_kernels.attention import law
from nki_kernels.attention.blocks import append_rows_kernel
from nki_kernels.attention.prompt import check, prompt_attention
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from tests.close import is_close
from tests.nki_kernels.attention.inputs import DTYPES
from tests.nki_kernels.recorded import events_of


@dataclass(frozen=True)
class Prompt:
    """A whole prompt: queries (H, S, D), keys and values (G, S, D)."""

    q: Any
    keys: Any
    values: Any

    def pools(self, slots: int, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
        """The first positions in pools (blocks, G, 128, D) of which other blocks are garbage, and the block table."""
        rng, (heads, _, dim) = np.random.default_rng(seed), self.keys.shape
        count = slots // 128
        table = 1 + rng.permutation(count + 2)[:count].astype(np.int32)
        pools = []
        for rows in (self.keys, self.values):
            pool = (1e3 * rng.standard_normal((count + 3, heads, 128, dim))).astype(rows.dtype)
            pool[table] = rows[:, :slots].reshape(heads, count, 128, dim).swapaxes(0, 1)
            pools.append(pool)
        return (pools[0], pools[1]), table[None]


def draw(heads: int, kv_heads: int, slots: int, dim: int, dtype: str) -> Prompt:
    """Normal numbers."""
    rng = np.random.default_rng(0)
    shapes = ((heads, slots, dim), (kv_heads, slots, dim), (kv_heads, slots, dim))
    return Prompt(*(rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes))


def run(x: Prompt, start: int, count: int, slots: int, **options: Any) -> Any:
    """Rows start to start + count of a prompt in a cache of `slots`: (H, C, D)."""
    pools, table = x.pools(slots, options.pop("seed", 1))
    rows = x.q[None, :, start : start + count].copy()
    return prompt_attention(rows, pools, np.array([[start]], np.int32), table, **options)[0]


def model_attention(x: Prompt, start: int, count: int) -> Any:
    """The same rows by model/attention.py in the same dtype."""

    def tensor(a: Any) -> torch.Tensor:
        wide = torch.from_numpy(np.ascontiguousarray(a).astype(np.float32))[None]
        return wide if a.dtype == np.float32 else wide.bfloat16()

    new = tensor(x.keys[:, start : start + count]), tensor(x.values[:, start : start + count])
    positions = torch.arange(start, start + count, dtype=torch.int32)[None]
    placement = Placement(positions, torch.arange(x.keys.shape[1], dtype=torch.int32))
    kept = Cache(tensor(x.keys), tensor(x.values))
    out, _ = torch_attention(EAGER, tensor(x.q[:, start : start + count]), new, kept, placement)
    return out[0].float().numpy()


def exact(x: Prompt, start: int, count: int) -> Any:
    wide = tuple(a.astype(np.float64) for a in (x.keys, x.values))
    return law.prompt_attention(x.q[:, start : start + count].astype(np.float64), wide, start)  # type: ignore[arg-type]


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "slots", "dim", "start", "count"),
    [((1, 1), 1024, 64, 0, 128), ((6, 3), 1024, 64, 517, 256), ((2, 1), 3072, 128, 2301, 384)],
    ids=str,
)
def test_as_exact_as_the_model(
    heads: tuple[int, int], slots: int, dim: int, start: int, count: int, dtype: str, lnc: int
) -> None:
    x = draw(*heads, slots, dim, dtype)
    out = run(x, start, count, slots, lnc=lnc)
    assert out.dtype == x.q.dtype
    assert is_close(out, model_attention(x, start, count), exact(x, start, count))


def test_a_row_too_far_is_not_the_model_s() -> None:
    """Negative control: seeing one position too many breaks the bound that the kernel keeps."""
    x = draw(1, 1, 1024, 64, "fp32")
    assert not is_close(exact(x, 101, 128), model_attention(x, 100, 128), exact(x, 100, 128))


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the maximum, tiny ones make all weights equal."""
    drawn = draw(2, 1, 3072, 64, "fp32")
    x = Prompt((drawn.q * size).astype(np.float32), drawn.keys, drawn.values)
    assert is_close(run(x, 2500, 128, 3072), model_attention(x, 2500, 128), exact(x, 2500, 128))


# of fp32 a chunk of keys ends at 2048, of bf16 at 4096: both sides of the border
@pytest.mark.parametrize(("dtype", "slots"), [("fp32", 4096), ("bf16", 5120)])
def test_bits_of_every_chunk_and_start(dtype: str, slots: int) -> None:
    """Rows in chunks of 2048, 512 and 128, at starts that are multiples of 128 or not, on one core and on two."""
    x = draw(1, 1, slots, 64, dtype)
    last = slots - 2048
    whole = {start: run(x, start, 2048, slots) for start in (0, last)}
    for start, count, lnc in ((last, 512, 1), (last + 37, 512, 1), (last + 1000, 128, 1), (slots - 384, 384, 2)):
        part = run(x, start, count, slots, lnc=lnc)
        assert same(part, whole[last][:, start - last : start - last + count].copy()), f"C={count} start={start}"
    # shorter caches, whose last chunk is narrower
    for start, count, short in ((0, 128, 1024), (1025, 256, 2048), (1500, 512, 3072)):
        assert same(run(x, start, count, short), whole[0][:, start : start + count].copy()), f"S={short} start={start}"


def test_bits_of_neighbours() -> None:
    """Other rows' queries, keys and values past a row, and the order of the blocks, do not affect it; its own do."""
    x = draw(2, 1, 1024, 64, "bf16")
    before = run(x, 600, 128, 1024)
    changed = Prompt(x.q.copy(), x.keys.copy(), x.values.copy())
    changed.q[:, 601:] = 3
    changed.keys[:, 601:], changed.values[:, 601:] = 1e30, -1e30
    after = run(changed, 600, 128, 1024, seed=5)
    assert same(after[:, :1].copy(), before[:, :1].copy())
    assert not same(after, before)
    changed.values[:, 0] *= 2
    assert not same(run(changed, 600, 128, 1024)[:, :1].copy(), before[:, :1].copy())


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_that_are_appended(lnc: int) -> None:
    """Rows of a prompt in their blocks, from the middle of one on; those beyond the table or in block 0 are dropped."""
    x, start, count = draw(6, 3, 1024, 64, "bf16"), 413, 640
    pools, table = x.pools(1024)
    table[0, 5] = 0
    new = [rows[None, :, start:1024].copy() for rows in (x.values, x.keys)]
    new = [np.pad(rows, ((0, 0), (0, 0), (0, count - rows.shape[2]), (0, 0)), constant_values=7) for rows in new]
    positions = np.arange(start, start + count, dtype=np.int32)[None]
    before = [pool.copy() for pool in pools]
    nki.simulate(append_rows_kernel[lnc])(*new, *pools, positions, table)
    for pool, old, rows in zip(pools, before, new, strict=True):
        for position in range(start, 1024):
            if table[0, position // 128]:
                old[table[0, position // 128], :, position % 128] = rows[0, :, position - start]
        assert same(pool, old)


def _operands() -> dict[str, Any]:
    x = draw(2, 1, 1024, 64, "bf16")
    pools, table = x.pools(1024)
    return {"q": x.q[None, :, :128], "pools": pools, "start": np.array([[896]], np.int32), "block_table": table}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": lambda q: q[:, :, :100]}, "C a multiple of 128"),
        ({"q": lambda q: q[..., :32]}, "head dim D is 32"),
        ({"q": lambda q: q.astype(np.float32)}, "all float32 or all bfloat16"),
        ({"pools": lambda p: (p[0], p[1][:, :, :64])}, "pass keys before any transpose"),
        ({"block_table": lambda t: t[:, :7]}, "fill it with block 0"),
        ({"block_table": lambda t: t.astype(np.int64)}, "fill it with block 0"),
        ({"start": lambda s: s + 1}, "rows 897 to 1024 do not lie in 1024 slots"),
        ({"start": lambda s: s[0]}, r"int32 \(1, 1\) is needed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_operands(change: dict[str, Callable[[Any], Any]], sentence: str) -> None:
    operands = _operands()
    check(**operands)
    operands.update({name: f(operands[name]) for name, f in change.items()})
    with pytest.raises(ValueError, match=sentence):
        prompt_attention(**operands)


def test_three_cores() -> None:
    with pytest.raises(ValueError, match="lnc is 3"):
        prompt_attention(**_operands(), lnc=3)


@cache
def share(count: int, slots: int, lnc: int = 1) -> float:
    """Simulated share of the Tensor Engine's bound for two heads of one kv head, D 128, bf16."""
    x = draw(2, 1, slots, 128, "bf16")
    events = events_of(run, x, slots - count, count, slots, lnc=lnc)
    flops = roofline.prompt_attention(roofline.AttentionDims(1, 2, 1, count, slots, 128, 2)).flops
    return flops / (lnc * TRN2.tensor_bf16_tflops.value * 1e3) / schedule(events, band=False).latency_ns


def test_share_of_the_tensor_engine() -> None:
    assert 0.60 <= share(2048, 8192) <= 1
    assert 0.53 <= share(2048, 8192, lnc=2) <= 1


def test_few_rows_have_a_smaller_share() -> None:
    """Negative control: the share is that of the work."""
    assert share(128, 8192) < share(512, 8192) < share(2048, 8192)
