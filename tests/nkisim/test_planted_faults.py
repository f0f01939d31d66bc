"""Each law by a pair: a kernel that breaks it is refused by name, its twin passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nkisim
from nkisim import errors
from tests.nkisim import faults_engines, faults_launch, faults_memory
from tests.nkisim.faults import CASES, LAUNCHES
from tests.nkisim.harness import out, run, tile

unwritten_tile, unwritten_output = faults_memory.unwritten_tile, faults_memory.unwritten_output


def test_both_lists_are_registered() -> None:
    assert CASES["two_psum_inputs"][1] is faults_engines.two_psum_inputs
    assert CASES["unwritten_tile"][1] is unwritten_tile
    assert LAUNCHES["no_barrier"][1] is faults_launch.no_barrier


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
@pytest.mark.parametrize("name", sorted(CASES))
def test_fault_is_named_and_its_twin_passes(name: str) -> None:
    law, body = CASES[name]
    run(lambda: body(False))
    with pytest.raises(law) as caught:
        run(lambda: body(True))
    assert type(caught.value) is law
    if law not in (errors.SbufFull, errors.PsumFull, errors.BadOutput):
        assert caught.value.line is None or caught.value.line[0].endswith(".py")


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_launch_fault_is_named_and_its_twin_passes(name: str) -> None:
    law, body = LAUNCHES[name]
    body(False)
    with pytest.raises(law) as caught:
        body(True)
    assert type(caught.value) is law


def test_there_are_enough_faults() -> None:
    assert len(CASES) >= 50


def test_messages_say_what_where_and_what_is_allowed() -> None:
    with pytest.raises(errors.UnwrittenRead) as caught:
        run(lambda: unwritten_tile(True))
    text = str(caught.value)
    assert "dma_copy: src reads 128 of 1024 elements of sbuf." in text
    assert "allocated at" in text
    assert "faults_memory.py" in text


def test_leniency_is_a_policy() -> None:
    def kernel() -> Any:
        return unwritten_output(True)

    assert run(kernel, tracking=False).shape == (128, 8)
    found = run(kernel, unwritten_output="allow")
    assert np.isnan(found[64:]).all()


def test_jitted_kernels_need_a_device_or_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = nkisim.jit(lambda: out(tile()))
    with pytest.raises(errors.NoDevice):
        kernel()
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert kernel().shape == (128, 8)
