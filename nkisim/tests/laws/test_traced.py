"""NKI 0.7: who chooses the version, what a scalar and a register can do, and how kernels are launched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import nki
import nki.compiler
import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim.errors import AmbiguousManual, RegisterMisuse
from nkisim.objects import NkiScalar, VirtualRegister
from nkisim.versions import VARIABLE

TRACED = nkisim.Policy(nki="0.7")


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "NEURON_LOGICAL_NC_CONFIG", "NKI_COMPILER_FRONTEND"):
        monkeypatch.delenv(name, raising=False)


def test_a_version_is_chosen_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of a launch, else that of `using`, else the environment, else 0.6."""

    def seen(policy: Any = None) -> str:
        result: list[str] = []
        nkisim.run(lambda: result.append(nki.__version__), (), policy=policy)
        assert policy or result == [nki.__version__]
        return result[0]

    assert seen() == "0.6.0"
    monkeypatch.setenv(VARIABLE, "0.7")
    assert seen() == "0.7.0"
    with nkisim.using(nkisim.Policy(nki="0.6")):
        assert seen() == "0.6.0"
        with nkisim.using("vendor"):
            assert seen() == "0.6.0"
        assert seen(TRACED) == "0.7.0"
    assert seen() == "0.7.0"


def traced(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **policy: Any) -> Any:
    return run(kernel, *args, lnc=lnc, nki="0.7", **policy)


def scalar(value: int = 1, dtype: str = "int32") -> NkiScalar:
    return NkiScalar(value, dtype)


def test_the_manuals_product_wraps() -> None:
    def kernel(x: Any) -> Any:
        stored = nl.load(x)
        number = nisa.scalar_load(stored)
        nisa.scalar_store(stored, number * number)
        return out(stored)

    assert traced(kernel, np.array([[100000]], np.int32)).tolist() == [[1410065408]]
    assert traced(kernel, np.array([[100000]], np.int64)).tolist() == [[10**10]]


USES: dict[str, Callable[[Any], Any]] = {
    "if": lambda x: 1 if x else 0,
    "not": lambda x: not x,
    "int": int,
    "range": range,
    "index": lambda x: [1, 2][x],
    "reshape": lambda x: "ab" * int(x),
}


@pytest.mark.parametrize("use", USES)
def test_python_does_not_see_what_the_device_knows(use: str) -> None:
    for make in (lambda: nisa.scalar_load(tile(1, 1, "int32")), lambda: nisa.register_alloc(1)):
        with pytest.raises(TypeError, match="no value while a kernel is traced"):
            traced(lambda make=make: USES[use](make()))


WRONG: dict[str, Callable[[], Any]] = {
    "a quotient": lambda: scalar(4) // 2,
    "a remainder from the right": lambda: 4 % scalar(),
    "bits": lambda: scalar() & 1,
    "two widths": lambda: scalar() + scalar(1, "int64"),
    "a number too large": lambda: scalar() + 2**31,
    "a float": lambda: scalar() * 0.5,
    "64 bits compared": lambda: scalar(1, "int64") < 2,
    "a sum of comparisons": lambda: (scalar() < 2) + 1,
    "a comparison stored": lambda: traced(lambda: nisa.scalar_store(tile(1, 1, "int32"), scalar() < 2)),
    "a comparison as a bound": lambda: traced(lambda: nl.fori_loop(0, scalar() < 2, lambda i: None)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_scalar_cannot_do(name: str) -> None:
    with pytest.raises(RegisterMisuse):
        WRONG[name]()


def test_the_counter_is_a_register_where_a_bound_is_one() -> None:
    seen: list[type] = []

    def kernel() -> Any:
        for upper in (2, nisa.register_alloc(2), nisa.scalar_load(tile(1, 1, "int32"))):
            nl.fori_loop(0, upper, lambda i: seen.append(type(i)))
        return out(tile())

    traced(kernel)
    assert seen == [NkiScalar] * 2 + [VirtualRegister] * 2 + [NkiScalar]


@nkisim.jit
def doubled(x: Any) -> Any:
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=2.0)
    return x


def test_a_kernel_of_python() -> None:
    """What the parser of 0.6 refuses: a kernel in a kernel, its result used, and Python around it."""

    class Halves:
        def __init__(self, *parts: Any, **_: Any) -> None:
            self.parts = parts

        def __iter__(self) -> Any:
            yield from self.parts

    def kernel(x: Any) -> Any:
        stored = nl.load(x)
        try:
            raise ValueError
        except ValueError:
            total = sum(part.shape[1] for part in Halves(stored[:, :4], stored[:, 4:], name=f"{1.5:.2f}"))
        assert total == 8
        return out(doubled(stored))

    x = np.ones((4, 8), np.float32)
    assert np.array_equal(traced(kernel, x), 2 * x)


def test_cores_without_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> Any:
        made = nl.ndarray((2, 1), nl.int32, nl.shared_hbm)
        mine = nl.program_id(0)
        nisa.dma_copy(dst=made[nl.ds(mine, 1)], src=tile(1, 1, "int32", mine + nl.num_programs(0)))
        return made

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert nkisim.run(kernel, (), policy=TRACED).outputs.tolist() == [[2], [3]]


def private(rows: int = 1, columns: int = 8, dtype: str = "float32") -> Any:
    made = nl.ndarray((rows, columns), dtype, nl.private_hbm)
    nisa.dma_copy(dst=made, src=tile(rows, columns, dtype, 0))
    return made


def loads() -> Any:
    stored = tile(1, 1, "int32")
    nisa.scalar_store(stored, nisa.scalar_load(stored) + nisa.scalar_load(stored))
    return out(stored)


def reduces() -> Any:
    both = tile()
    for _ in range(2):
        nisa.sendrecv_compute(tile(), both, 1 - nl.program_id(0), 1 - nl.program_id(0), nl.add)
    return out(both)


@pytest.mark.parametrize(("kernel", "lnc"), [(loads, 1), (reduces, 2)])
def test_a_time_without_a_document_is_doubted_once(kernel: Callable[..., Any], lnc: int) -> None:
    for recording in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced(kernel, lnc=lnc, recording=recording)
        requested = [str(w.message) for w in caught if w.category is AmbiguousManual]
        assert len(set(requested)) == len(requested)
        assert bool(requested) == recording
        assert all("its time" in text and "ask a device" in text for text in requested)
