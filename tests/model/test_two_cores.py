"""Every launch on a build's two cores gives the bits that one core gives, and a core without work issues nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import nkisim
from compile.device_check.kernels import CASES
from model.nki.launches import LNC
from model.nki.table import KERNELS

# results that a core gives of its own part: (cores, ...), which the model merges
_BY_CORE = ("coupled_sample_kernel", "weights_above_kernel")
# of small operands one core does all
_IDLE = ("accept_drafts_kernel", "decode_mlp_kernel")


def _outputs(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", CASES)
def test_two_cores_give_the_bits_of_one(name: str) -> None:
    ran: list[str] = []

    def run(launched: Any) -> Any:
        def call(*arguments: Any) -> Any:
            assert launched.lnc == LNC, "a kernel runs on the cores of a build"
            alone = copy.deepcopy(arguments)
            policy = nkisim.Policy(recording=True)
            two, one = (nkisim.run(k, a, policy=policy) for k, a in ((launched, arguments), (launched[1], alone)))
            kernel = launched.fn.__name__
            ran.append(kernel)
            if kernel not in _BY_CORE:
                for a, b in zip(_outputs(two.outputs), _outputs(one.outputs), strict=True):
                    assert a.tobytes() == b.tobytes()
            for a, b in zip(arguments, alone, strict=True):
                assert not isinstance(a, np.ndarray) or a.tobytes() == b.tobytes()
            assert ({e.core for e in two.recording.events} == {0}) == (kernel in _IDLE)
            return two.outputs

        return call

    assert all(r.error <= r.bound for r in CASES[name](run))
    assert ran


def test_every_launched_kernel_is_among_the_cases() -> None:
    cases = " ".join(CASES)
    assert all(name in cases for name in KERNELS)
