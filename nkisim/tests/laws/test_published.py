"""What published kernels rely on: what the texts allow runs strictly, the rest by the policy vendor, which warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile, vendor
from nkisim import errors

TILE = np.arange(128 * 512, dtype=np.float32).reshape(128, 512)


# explicit addresses


def at(column: int, columns: int = 128, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray((128, columns), nl.float32, buffer, address=(0, column))


@pytest.mark.parametrize("tracking", [True, False])
def test_the_first_product_into_a_tensor_overwrites(tracking: bool) -> None:
    def kernel(x: Any) -> Any:
        ones, results = nl.load(x), []
        banks = [at(0, 512, nl.psum) for _ in range(2)]
        for bank in banks:
            nisa.nc_matmul(bank, ones[:, 0:128], ones)
            x_sb = nl.ndarray((128, 512), nl.float32)
            nisa.tensor_copy(x_sb, bank)
            results.append(out(x_sb))
        return tuple(results)

    first, second = run(kernel, np.ones((128, 512), np.float32), tracking=tracking)
    assert (first == 128).all()
    assert (second == 128).all()


@pytest.mark.parametrize("columns", [slice(0, 64), slice(0, 128, 2)])
def test_a_write_takes_the_bytes_of_older_tensors_and_no_others(columns: slice) -> None:
    def kernel(column: int) -> Any:
        older, newer = at(0), at(256)
        nisa.memset(dst=older, value=1.0)
        nisa.memset(dst=newer[:, columns], value=2.0)
        return out(older[:, column : column + 1])

    # of `newer` only the bytes that were written count: its first column is the 64th of `older`
    assert (run(lambda: kernel(63)) == 1).all()
    assert (run(lambda: kernel(65 if columns.step else 0)) == 1).all()
    with pytest.raises(errors.ReplacedRead, match="written on its bytes"):
        run(lambda: kernel(64))


# classes of the language


@dataclass
class Section(nl.NKIObject):
    index = None
    never_passed: int


class Plain(nl.NKIObject):
    x: int
    y: bool = False

    def __post_init__(self) -> None:
        self.z = self.x + 1


@dataclass(frozen=True)
class Frozen(nl.NKIObject):
    x: int
    parts: tuple[int, ...] = field(default_factory=tuple)


def test_classes_have_the_documented_initializer() -> None:
    section, plain = Section(index=3), Plain(1)  # type: ignore[call-arg]
    assert (section.index, section.never_passed) == (3, None)
    assert (plain.x, plain.y, plain.z) == (1, False, 2)
    assert (Plain(1, True).y, Frozen(2).x, Frozen(2).parts) == (True, 2, ())
    with pytest.raises(TypeError, match="unexpected keyword"):
        Plain(2, colour=3)  # type: ignore[call-arg]


# truth, versions, broadcasting


def test_a_tensor_is_true_whatever_it_holds_and_a_comparison_is_its_data() -> None:
    def kernel(x: Any) -> Any:
        zero = tile(value=0)
        assert zero
        assert not nl.equal(zero, tile(value=1))
        assert nl.equal(zero, tile(value=0))
        return out(zero)

    run(kernel, TILE)


# two cores


def both(value: Callable[[], float], read: bool = False) -> Callable[[], Any]:
    def kernel() -> Any:
        shared = nl.ndarray((128, 8), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=shared, src=tile(value=value()))
        if read:
            back = nl.load(shared)
            nisa.dma_copy(dst=shared, src=back)
        return shared

    return kernel


@pytest.mark.parametrize("read", [False, True])
def test_cores_may_write_the_same_bytes(read: bool) -> None:
    with pytest.warns(errors.NkiSimWarning, match="both cores write the same bytes"):
        assert (run(both(lambda: 3.0, read), lnc=2) == 3).all()


def test_one_byte_that_differs_is_a_race() -> None:
    with pytest.raises(errors.HbmRace):
        run(both(lambda: 3.0 + nl.program_id(0) * 2.0**-20), lnc=2)


def test_reading_before_both_write_the_same_is_a_race() -> None:
    def kernel(x: Any) -> Any:
        x_sb = nl.load(x)
        nisa.dma_copy(dst=x, src=tile(128, 512, value=1))
        return out(x_sb) if nl.program_id(0) == 0 else out(tile(128, 512))

    with pytest.raises(errors.HbmRace):
        run(kernel, TILE.copy(), lnc=2)


def other_barrier() -> Any:
    shared, empty = (nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name=n) for n in ("shared", "empty"))
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=shared, src=tile(value=3))
    nisa.core_barrier(data=empty, cores=(0, 1))
    return out(nl.load(shared))


def test_a_barrier_of_a_different_tensor_is_an_order_for_the_vendor() -> None:
    assert (vendor(other_barrier, lnc=2) == 3).all()
    with pytest.raises(errors.HbmRace):
        run(other_barrier, lnc=2)


# views


def test_a_view_outside_that_nobody_takes_is_no_fault() -> None:
    def kernel(x: Any, taken: bool) -> Any:
        x_sb = nl.load(x)
        made = [x_sb.ap(pattern=[[512, 128], [1, 512]], offset=1), x_sb[:, 4:4], x_sb[:, 500:513], x_sb.slice(1, 9, 3)]
        return out(made[0] if taken else x_sb)

    assert np.array_equal(run(kernel, TILE, False), TILE)
    with pytest.raises(errors.OutOfRange) as caught:
        run(kernel, TILE, True)
    assert caught.value.line is not None
    assert Path(__file__).read_text().splitlines()[caught.value.line[1] - 1].lstrip().startswith("made =")


# kernels in kernels, integers for enumerations, capacity


@nkisim.jit
def inner(x_sb: Any) -> None:
    nisa.tensor_scalar(x_sb, x_sb, nl.multiply, 2.0)


def outer(x: Any) -> Any:
    x_sb = nl.load(x)
    inner(x_sb)
    inner(x_sb)
    return out(x_sb)


def test_a_kernel_in_a_kernel_is_inlined() -> None:
    assert np.array_equal(vendor(outer, TILE), 4 * TILE)


def integers(x: Any) -> Any:
    shared = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=shared, src=x, dge_mode=3)
    x_sb = nl.load(shared)
    nisa.tensor_copy(x_sb, x_sb, engine=5)
    return out(x_sb)


def transposed(x: Any) -> Any:
    x_sb = nl.ndarray((128, 128), x.dtype)
    nisa.dma_transpose(dst=x_sb, src=x[0:128, 0:128], dge_mode=nisa.dge_mode.none)
    return out(x_sb)


def test_integers_stand_for_members() -> None:
    assert np.array_equal(vendor(integers, TILE), TILE)
    assert np.array_equal(vendor(transposed, TILE), TILE[:, :128].T)
    for kernel, text in ((integers, "engine is 5"), (transposed, "dge_mode is none")):
        with pytest.raises(errors.WrongArgument, match=text):
            run(kernel, TILE)


def four_halves(x: Any, columns: int = 16384) -> Any:
    tiles = []
    for i in range(4):
        one = nl.ndarray((64, columns), nl.float32)
        nisa.memset(one, float(i))
        tiles.append(one)
    shared = nl.ndarray((64, columns), nl.float32, nl.shared_hbm)
    for one in tiles:
        nisa.dma_copy(dst=shared, src=one)
    return shared


def test_tensors_on_disjoint_partitions_may_share_bytes() -> None:
    assert (vendor(four_halves, TILE) == 3).all()
    with pytest.raises(errors.SbufFull):
        run(four_halves, TILE)
    policy = nkisim.Policy(packing="partitions", recording=True)
    with pytest.warns(errors.Relaxed, match="share bytes"):
        recording = nkisim.run(four_halves, (TILE,), policy=policy).recording
    places = {(w.partitions, w.span) for e in recording.events for w in e.writes if w.space == "sbuf"}
    assert places == {((p, p + 64), (b, b + 65536)) for p in (0, 64) for b in (0, 65536)}


def test_what_does_not_fit_is_a_warning_and_never_a_time() -> None:
    wide = nkisim.Policy(capacity="warn")
    with pytest.warns(errors.Relaxed, match="sbuf holds"):
        assert (nkisim.run(four_halves, (TILE,), policy=wide).outputs == 3).all()
    with pytest.raises(errors.SbufFull):
        nkisim.run(four_halves, (TILE,), policy=nkisim.Policy(capacity="warn", recording=True))
    with pytest.raises(errors.BadLaunch, match="times are wrong"):
        nkisim.Policy(capacity=False, recording=True)


# who chooses


def test_every_entry_point_takes_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = nkisim.simulate(nkisim.jit(outer))
    with pytest.raises(errors.KernelInsideKernel):
        kernel(TILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.Relaxed)
        with nkisim.using("vendor"):
            assert np.array_equal(kernel(TILE), 4 * TILE)
        monkeypatch.setenv("NKISIM_POLICY", "vendor")
        assert np.array_equal(kernel(TILE), 4 * TILE)
    with pytest.raises(errors.KernelInsideKernel):
        nkisim.run(outer, (TILE,), policy="strict")
    monkeypatch.setenv("NKISIM_POLICY", "lax")
    with pytest.raises(errors.BadLaunch, match="'lax'; it can be default, strict, vendor"):
        kernel(TILE)


# transposes of fp8, patterns


def fp8_transposed(x: Any) -> Any:
    source, result = (nl.ndarray((32, 32), nl.float8_e4m3) for _ in range(2))
    nisa.tensor_copy(source, nl.load(x[0:32, 0:32]))
    psum = nl.ndarray((32, 64), nl.float8_e4m3, buffer=nl.psum)
    nisa.nc_transpose(psum[:, ::2], source)
    nisa.tensor_copy(result, psum[:, ::2])
    return out(result)


def test_an_fp8_transpose_writes_every_second_element() -> None:
    values = np.resize(np.arange(-8.0, 8.0, dtype=np.float32), TILE.shape)
    values[0] = 3
    assert np.array_equal(run(fp8_transposed, values).astype(np.float32), values[:32, :32].T)


def halves_of_rows(x: Any, step: int) -> Any:
    x_sb = nl.load(x)
    return out(x_sb.ap([[step, 128], [1, x_sb.shape[1] // 2]], offset=0))


def test_a_pattern_goes_on_to_the_next_partition() -> None:
    columns = TILE.shape[1]
    full = run(halves_of_rows, TILE, columns)
    with pytest.warns(errors.AmbiguousManual, match="taken as one partition"):
        assert np.array_equal(run(halves_of_rows, TILE, columns // 2), full)
    with pytest.raises(errors.IllegalView):
        run(halves_of_rows, TILE, columns // 2 + 1)
