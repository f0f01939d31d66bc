"""The witness itself: who counts as the vendor's nki, what counts as agreement, and the vendor where it is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import nkisim.isa as nisa
import nkisim.language as nl
import witness
from harness import draw, on_device
from nkisim import jit, simulate
from nkisim.install import install

X = draw((8, 5), seed=3)


def double(dst: Any, x: Any) -> None:
    nisa.tensor_tensor(dst=dst, data1=x, data2=x, op=nl.add)


def package(**wrong: Any) -> Any:
    """Return nkisim dressed as another package, with some of its instructions replaced."""
    isa = SimpleNamespace(**{**vars(nisa), **wrong})
    return SimpleNamespace(isa=isa, language=SimpleNamespace(**vars(nl)), jit=jit, simulate=simulate)


def observed(other: Any) -> witness.Witness:
    seen = witness.Witness(other)
    witness.ACTIVE.append(seen)
    try:
        on_device(double, (X,), [(X.shape, "float32")])
    finally:
        witness.ACTIVE.remove(seen)
    return seen


def test_equal_bits_are_counted_and_the_names_come_back() -> None:
    assert observed(package()).exact == 1
    assert globals()["nisa"] is sys.modules["nkisim.isa"]


def test_another_result_is_an_error() -> None:
    def wrong(dst: Any, data1: Any, data2: Any, op: Any) -> None:
        nisa.tensor_scalar(dst=dst, data=data1, op0=nl.multiply, operand0=2.01)

    with pytest.raises(AssertionError, match="differ by"):
        observed(package(tensor_tensor=wrong))


def test_a_look_alike_is_not_the_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert witness.vendor() is None
    assert install()
    assert not witness.is_real(ModuleType("nki"))


def test_the_vendor_agrees() -> None:
    result = witness.vendor()
    if result is None:
        pytest.skip(witness.ABSENT)
    assert observed(result).exact == 1
