"""What the rules decided once is used again only where they would decide the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim import errors
from nkisim.geometry import CORE_V3
from nkisim.isa import plan

DATA = np.ones((4, 4), np.float32)


@pytest.mark.parametrize("value", [1.5, 300])
def test_a_different_number_is_a_different_case(value: Any) -> None:
    run(lambda: out(tile(4, 4, "uint8", 1)))
    with pytest.raises(errors.WrongArgument):
        run(lambda: out(tile(4, 4, "uint8", value)))


@pytest.mark.parametrize("change", ["shape", "dtype", "memory", "start"])
def test_what_rules_look_at_is_distinguished(change: str) -> None:
    laws = {
        "shape": errors.ShapeMismatch,
        "dtype": errors.WrongDtype,
        "memory": errors.WrongSpace,
        "start": errors.StartPartition,
    }

    def kernel(bad: bool) -> Any:
        wide, words = tile(128, 8), tile(16, 8, "uint32", 0)
        data = wide[0:16]
        if bad:
            if change == "memory":
                data = nl.ndarray((16, 8), nl.float32, nl.psum)
                nisa.memset(dst=data, value=1.0)
            else:
                data = {"shape": tile(32, 8), "dtype": tile(16, 8, "bfloat16"), "start": wide[16:32]}[change]
        got = tile(16, 8)
        nisa.nc_n_gather(dst=got, data=data, indices=words)
        return out(got)

    for _ in range(2):
        run(lambda: kernel(False))
        with pytest.raises(laws[change]):
            run(lambda: kernel(True))


def test_a_warning_is_given_in_every_launch() -> None:
    def kernel() -> Any:
        x, dst = tile(32, 32), nl.ndarray((32, 32), nl.float32, nl.psum)
        nisa.nc_matmul(dst=dst, stationary=x, moving=x, tile_position=(0, 0), tile_size=(32, 32))
        return out(nl.copy(dst))

    for _ in range(2):
        with pytest.warns(errors.AmbiguousManual, match="column tiling"):
            run(kernel)


def test_another_geometry_has_other_plans() -> None:
    def kernel(a: Any) -> Any:
        x, dst = nl.load(a), nl.ndarray((4, 4), nl.float32, nl.psum)
        nisa.nc_matmul(dst=dst, stationary=x, moving=x)
        return out(nl.copy(dst))

    assert (nkisim.run(kernel, (DATA,)).outputs == 4).all()
    with pytest.raises(errors.TileTooLarge):
        nkisim.run(kernel, (DATA,), geometry=replace(CORE_V3, gemm_moving_fmax=2))


def test_plans_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST", 3)

    def kernel() -> Any:
        x = tile(4, 4)
        for i in range(9):
            nisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=float(i))
        return out(x)

    assert (run(kernel) == 37).all()
    assert len(nisa.tensor_scalar.card.plans) <= 3
