"""Random numbers. The Vector Engine's generator is undocumented: ours is a stand-in.

GpSimd's is XORWOW with six words of state per lane (manual); the Vector Engine's is replaced by
PCG64 streams, so its numbers differ from the hardware's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nkisim.core.context import Core
from nkisim.dtypes import INTS, Array
from nkisim.enums import engine
from nkisim.errors import NeedsNewerCore, NotSimulated, ShapeMismatch, WrongDtype
from nkisim.isa.card import card
from nkisim.isa.rules import elements, same_elements, same_partitions
from nkisim.isa.statement import ON_CHIP, SBUF, Call, Operand, Results, Target

_WORDS = frozenset({"uint32", "int32", "float32"})
# words of one XORWOW state: x, y, z, w, v, d
STATE = 6


def generator(core: Core) -> np.random.Generator:
    """The Vector Engine's stand-in of a core."""
    result = core.random.get("vector")
    if result is None:
        result = np.random.default_rng([core.policy.seed, core.number])
        core.random["vector"] = result
    return result


def _lanes(core: Core) -> NDArray[np.uint32]:
    result = core.random.get("gpsimd")
    if result is None:
        start = np.random.default_rng([core.policy.seed, core.number, 1])
        size = (core.geometry.partitions, STATE)
        result = start.integers(1, 2**32, size=size, dtype=np.uint64).astype(np.uint32)
        core.random["gpsimd"] = result
    return result


def xorwow(state: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Advance every lane `count` times in place; return (lanes, count) words (Marsaglia 2003)."""
    result = np.empty((state.shape[0], count), np.uint32)
    x, y, z, w, v, d = (state[:, i].copy() for i in range(STATE))
    for i in range(count):
        t = x ^ (x >> np.uint32(2))
        x, y, z, w = y, z, w, v
        v = (v ^ (v << np.uint32(4))) ^ (t ^ (t << np.uint32(1)))
        d = d + np.uint32(362437)
        result[:, i] = d + v
    state[:] = np.stack([x, y, z, w, v, d], axis=1)
    return result


def _draw(call: Call, results: Results) -> Results:
    dst = call.tensors["dst"]
    shape = (dst.shape[0], dst.size // dst.shape[0])
    if call.engine == "gpsimd":
        words = xorwow(_lanes(call.core)[: shape[0]], shape[1])
    else:
        words = generator(call.core).integers(0, 2**32, size=shape, dtype=np.uint32)
    dtype = dst._numpy().dtype
    return [words.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)]


@card("vector gpsimd", Operand("dst", "out", dtypes=INTS - {"bool"}), finish=_draw)
def rng(dst: Target, engine: engine = engine.vector, name: str | None = None) -> None:
    """Fill an integer tile with random bits, the low bits of 32-bit words."""
    return None


def _dropped(call: Call, results: Results) -> Results:
    data, prob = results[0]
    draw = generator(call.core).random(data.shape, dtype=np.float32)
    return [np.where(draw < np.asarray(prob, np.float32), data.dtype.type(0), data)]


def _dropout_rules(call: Call) -> None:
    dst, data, prob = call.tensors["dst"], call.tensors["data"], call.tensors.get("prob")
    if dst.dtype != data.dtype:
        call.refuse(WrongDtype, "dst", f"is {dst.dtype}", f"data is {data.dtype}")
    if prob is not None and data.dtype in INTS and prob.dtype != "float32":
        call.refuse(WrongDtype, "prob", f"is {prob.dtype}", "integer data takes a float32 prob")


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in", math="raw"),
    Operand("prob", "in", scalar=True, column=True),
    rules=(same_elements("dst", "data"), same_partitions("data", "prob"), _dropout_rules),
    finish=_dropped,
)
def dropout(
    dst: Target, data: Array, prob: Array | float, name: str | None = None
) -> tuple[tuple[Array, Array | float]]:
    """Replace elements by zero with a probability; the others stay."""
    return ((data, prob),)


def _seeded(call: Call, results: Results) -> Results:
    seed = int(np.asarray(results[0]).reshape(-1)[:1].view(np.uint32)[0])
    call.core.random["vector"] = np.random.default_rng([seed, 2])
    return []


def _one(call: Call) -> None:
    if call.tensors["src_seeds"].size != 1:
        call.refuse(ShapeMismatch, "src_seeds", f"has shape {call.tensors['src_seeds'].shape}", "[1, 1] is needed")


@card("vector", Operand("src_seeds", "in", spaces=ON_CHIP, dtypes=_WORDS, math="raw"), rules=(_one,), finish=_seeded)
def set_rng_seed(src_seeds: Array, name: str | None = None) -> Array:
    """Seed the Vector Engine's generator."""
    return np.ascontiguousarray(src_seeds)


def _on_gpsimd(call: Call) -> None:
    if call.engine == "vector" and call.core.geometry.generation < 4:
        raise NeedsNewerCore(f"{call.card.op} on the Vector Engine")
    if call.engine == "vector":
        raise NotSimulated(call.card.op, "engine", "no page says what the Vector Engine's 24 words are; use gpsimd")


def _set_state(call: Call, results: Results) -> Results:
    _lanes(call.core)[: len(results[0])] = results[0]
    return []


@card(
    "gpsimd vector",
    Operand("src_seeds", "in", spaces=SBUF, dtypes=frozenset({"uint32"}), math="raw"),
    rules=(_on_gpsimd, elements("src_seeds", exactly=STATE)),
    finish=_set_state,
)
def rand_set_state(src_seeds: Array, engine: engine = engine.gpsimd, name: str | None = None) -> Array:
    """Set the six XORWOW words of each GpSimd lane."""
    return src_seeds


def _get_state(call: Call, results: Results) -> Results:
    return [_lanes(call.core)[: call.tensors["dst"].shape[0]]]


@card(
    "gpsimd vector",
    Operand("dst", "out", spaces=SBUF, dtypes=frozenset({"uint32"})),
    rules=(_on_gpsimd, elements("dst", exactly=STATE)),
    finish=_get_state,
)
def rand_get_state(dst: Target, engine: engine = engine.gpsimd, name: str | None = None) -> None:
    """Store the six XORWOW words of each GpSimd lane."""
    return None
