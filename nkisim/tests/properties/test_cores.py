"""Registers and the exchange between two cores, property-tested."""

from __future__ import annotations

from properties.tiles import *


@covers("register_alloc", "register_move", "register_load", "register_store")
@PROPERTY
@given(st.sampled_from(["int32", "uint32", "int16", "uint8"]), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_registers_carry_integers(dtype: str, seed: int, column: int) -> None:
    x = values((1, 4), dtype, seed)

    def kernel(source: Any) -> Any:
        tile, result = nl.load(source), nl.ndarray((1, 3), dtype=source.dtype)
        first, second = nisa.register_alloc(), nisa.register_alloc(5)
        nisa.register_store(result[:, 0:1], second)
        nisa.register_load(first, tile[:, column : column + 1])
        nisa.register_move(second, first)
        nisa.register_move(first, 9)
        nisa.register_store(result[:, 1:2], second)
        nisa.register_store(result[:, 2:3], first)
        return out(result)

    assert on_hbm(kernel, [x]).tolist() == [[5, int(x[0, column]), 9]]


@covers("sendrecv")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS + INTEGERS), st.booleans())
def test_sendrecv_swaps_tiles(data: Any, shape: Shape, dtype: str, local: bool) -> None:
    x = values((2, *shape), dtype, 1)
    way = nisa.dma_engine.gpsimd_dma if local else nisa.dma_engine.dma
    spots = [data.draw(places(shape, psum=False)) for _ in range(2)]

    def kernel(source: Any) -> Any:
        core = nl.program_id(0)
        stage, (_, mine), (_, other) = nl.load(source[core]), *(p.allocate(shape, dtype) for p in spots)
        nisa.tensor_copy(dst=mine, src=stage)
        if mine.shape != other.shape:
            other = other.reshape(mine.shape)
        nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0, dma_engine=way)
        result = nl.ndarray((2, *shape), dtype=dtype, buffer=nl.shared_hbm)
        nisa.tensor_copy(dst=stage, src=other)
        nisa.dma_copy(dst=result[core], src=stage)
        return result

    assert run(kernel, x, lnc=2).tobytes() == x[::-1].tobytes()


@covers("core_barrier")
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS + INTEGERS), st.integers(0, 1))
def test_core_barrier_shows_what_the_other_core_wrote(shape: Shape, dtype: str, writer: int) -> None:
    x = values(shape, dtype, 1)

    def kernel(source: Any) -> Any:
        middle = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name="middle")
        result = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name="result")
        if nl.program_id(0) == writer:
            nisa.dma_copy(dst=middle, src=nl.load(source))
        nisa.core_barrier(data=middle, cores=(0, 1))
        if nl.program_id(0) != writer:
            nisa.dma_copy(dst=result, src=nl.load(middle))
        return result

    assert run(kernel, x, lnc=2).tobytes() == x.tobytes()
