"""A child of test_kernels.py: digests of what instructions and kernels compute, and the machine that it found."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from nki_kernels.attention.host import Candidates, verify_attention
from nki_kernels.layer.host import Place, decode_attention
from nki_kernels.sampling.host import Shard, coupled_sample, gumbel_noise, weights_above

import nkisim.isa as nisa
import nkisim.language as nl
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up
from nkisim import machine
from nkisim.isa import functions as elementary
from nkisim.isa.activations import ON_SCALAR_ENGINE
from nkisim.tests.harness import STORED, on_device
from tests.nki_kernels.attention import inputs as attention
from tests.nki_kernels.layer import inputs as layer
from tests.nki_kernels.sampling import inputs as sampling


def digest(*arrays: Any) -> str:
    """A hash of the arrays' bits."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def numbers(shape: tuple[int, ...], dtype: str, seed: int, spread: int = 0) -> Any:
    """Numbers in [-1, 1), times up to 2**spread, from integers: no function of a library is between seed and bits."""
    rng = np.random.default_rng(seed)
    fractions = rng.integers(-(2**24), 2**24, shape) / 2**24
    return np.ldexp(fractions, rng.integers(0, spread + 1, shape)).astype(STORED[dtype])


def product(dtype: str, depth: int, rows: int, columns: int, spread: int = 0) -> Any:
    """A matrix product of one instruction."""
    a, b = numbers((depth, rows), dtype, 1, spread), numbers((depth, columns), dtype, 2, spread)

    def body(dst: Any, stationary: Any, moving: Any) -> None:
        total = nl.ndarray(dst.shape, nl.float32, nl.psum)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving)
        nisa.tensor_copy(dst=dst, src=total)

    return on_device(body, (a, b), [((rows, columns), "float32")])


def products() -> dict[str, str]:
    """Products of several types and shapes; rows and columns alone and among others."""
    cases = [("float32", 128, 128, 512, 0), ("float32", 37, 5, 11, 0), ("float32", 128, 16, 33, 40),
             ("bfloat16", 128, 128, 512, 0), ("float16", 100, 3, 7, 4), ("float8_e4m3", 128, 9, 64, 3)]  # fmt: skip
    listed = {f"product {' '.join(map(str, case))}": digest(product(*case)) for case in cases}
    a, b = numbers((128, 128), "float32", 1), numbers((128, 256), "float32", 2)

    def corner(m: int, n: int) -> str:
        def body(dst: Any, stationary: Any, moving: Any) -> None:
            total = nl.ndarray(dst.shape, nl.float32, nl.psum)
            nisa.nc_matmul(dst=total, stationary=stationary, moving=moving)
            nisa.tensor_copy(dst=dst, src=total)

        return digest(on_device(body, (a[:, :m].copy(), b[:, :n].copy()), [((m, n), "float32")])[0, 0])

    return listed | {f"corner of {m} x {n}": corner(m, n) for m in (1, 3, 128) for n in (1, 17, 256)}


def reductions() -> dict[str, str]:
    """Sums, products and maxima along and across partitions, statistics, the largest eight."""
    x = numbers((96, 333), "float32", 3, 3)
    zeros = np.copysign(np.float32(0), numbers((96, 333), "float32", 4)).astype(np.float32)

    def reduced(op: Any) -> Any:
        def body(dst: Any, data: Any) -> None:
            nisa.tensor_reduce(dst=dst, op=op, data=data, axis=1)

        return body

    def across(dst: Any, data: Any) -> None:
        nisa.tensor_partition_reduce(dst=dst, op=nl.add, data=data)

    def statistics(dst: Any, data: Any) -> None:
        six = nl.ndarray((96, 6), dtype="float32")
        nisa.bn_stats(dst=six, data=data)
        nisa.bn_aggr(dst=dst, data=six)

    def eight(dst: Any, src: Any) -> None:
        nisa.max8(dst=dst, src=src)

    column = [((96, 1), "float32")]
    listed = {f"reduce {op.__name__}": digest(on_device(reduced(op), (x,), column))
              for op in (nl.add, nl.multiply, nl.maximum)}  # fmt: skip
    return listed | {
        "across partitions": digest(on_device(across, (x,), [((1, 333), "float32")])),
        "statistics": digest(on_device(statistics, (x,), [((96, 2), "float32")])),
        "eight zeros": digest(on_device(eight, (zeros,), [((96, 8), "float32")])),
        "maximum of zeros": digest(on_device(reduced(nl.maximum), (zeros,), column)),
    }


def functions() -> dict[str, str]:
    """Every function of the Scalar Engine, and those of the language that no engine has."""
    x = numbers((128, 600), "float32", 5, 4)

    def activated(name: str) -> Any:
        def body(dst: Any, data: Any) -> None:
            nisa.activation(dst=dst, op=getattr(nl, name), data=data)

        return body

    def spoken(name: str) -> Any:
        def body(dst: Any, data: Any) -> None:
            nisa.tensor_copy(dst=dst, src=getattr(nl, name)(data))

        return body

    def power(dst: Any, data: Any) -> None:
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.power, operand0=0.37)

    bodies = {name: activated(name) for name in sorted(ON_SCALAR_ENGINE)}
    bodies |= {f"nl.{name}": spoken(name) for name in ("sin", "cos", "tan")}
    listed = {}
    for name, body in bodies.items():
        # those of positive numbers get these
        data = np.abs(x) if name in ("log", "sqrt", "rsqrt") else x
        listed[f"function {name}"] = digest(on_device(body, (data,), [(x.shape, "float32")]))
    return listed | {"function power": digest(on_device(power, (np.abs(x),), [(x.shape, "float32")]))}


def attentions() -> dict[str, str]:
    """Verification attention: eight rows together, and the last of them alone."""
    listed = {}
    for dtype in ("fp32", "bf16"):
        x = attention.draw(attention.Dims(2, 2, 1, 8, 700, 64, dtype), first=[500, 40])
        together = verify_attention(x.q, x.new, x.fresh(), Candidates(x.positions))
        (keys, values), places = x.fresh(), x.positions
        for b in range(2):
            keys[b][:, :, places[b, :7]] = x.new[0][b][:, :7].swapaxes(1, 2)
            values[b][:, places[b, :7]] = x.new[1][b][:, :7]
        last = x.q[:, :, 7:].copy(), (x.new[0][:, :, 7:].copy(), x.new[1][:, :, 7:].copy())
        alone = verify_attention(*last, (keys, values), Candidates(places[:, 7:].copy()))
        listed |= {f"attention {dtype}": digest(together)}
        listed |= {f"row of attention {dtype}, alone": digest(alone)}
        listed |= {f"row of attention {dtype}, among others": digest(together[:, :, 7:])}
    return listed


def layers() -> dict[str, str]:
    """Both halves of a fused layer: all rows, and the first alone and among them."""
    listed = {}
    for dtype in ("fp32", "bf16"):
        a = layer.draw_attention(layer.AttentionDims(1, 9, 256, 2, 1, 700), dtype, first=[600])
        m = layer.draw_mlp(17, 256, 224, dtype)

        def half(x: layer.Attention) -> Any:
            # tables of angles are the host's work, and numpy's cosines are not the same everywhere
            angles = x.positions[..., None] * np.arange(x.dim // 2, dtype=np.float32) / np.float32(x.dim)
            turns = (elementary.rounded(function)(angles) for function in (elementary.cos, elementary.sin))
            return decode_attention(x.x, x.packed(), x.pools(), Place(x.positions, x.table(), *turns))

        def mlp(x: layer.MLP) -> Any:
            return decode_mlp(x.x, x.gamma, (pack_gate_up(x.gate, x.up), pack(x.down)))

        together, rows = half(a), mlp(m)
        listed |= {f"layer {dtype}": digest(together, rows)}
        alone = half(a.part(slice(0, 1), slice(0, 1))), mlp(m.rows(slice(1)))
        listed |= {f"row of a layer {dtype}, alone": digest(*alone)}
        listed |= {f"row of a layer {dtype}, among others": digest(together[:, :1], rows[:1])}
    return listed


def samples() -> dict[str, str]:
    """Noise, coupled samples and weights of the sampling kernels."""
    x = sampling.draw(sampling.Dims(5, 333, 7))
    seeds, positions = sampling.generator_rows(5)
    noise, scale = gumbel_noise(seeds, positions, x.start, columns=333), np.full((5, 1), 0.7, np.float32)
    weights = weights_above(x.logits, (scale, -scale), np.full_like(scale, -9), x.logits[:, :3].copy())
    return {
        "noise": digest(noise),
        "samples": digest(*coupled_sample(Shard(x.logits, x.start), noise, x.temperature, x.floor)),
        "weights": digest(weights),
    }


def main() -> None:
    """Print one JSON object."""
    facts = {"blas": machine.blas_kernels(), "sets": machine.instruction_sets()}
    drawn = attention.draw(attention.Dims(2, 2, 1, 8, 700, 64)), layer.draw_mlp(17, 256, 224, "bf16")
    listed = {"inputs": digest(drawn[0].q, drawn[0].keys, *(a.view(np.int16) for a in drawn[1].all))}
    for group in (products, reductions, functions, attentions, layers, samples):
        listed |= group()
    print(json.dumps({"machine": facts, "digests": listed}))


if __name__ == "__main__":
    main()
