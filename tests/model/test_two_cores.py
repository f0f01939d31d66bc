"""Every launch on a build's two cores gives the bits that one core gives, and a core without work issues nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nkisim
from compile.device_check.kernels import CASES
from model.nki.context import make_context
from model.nki.launches import LNC, Launch, filled
from model.nki.table import KERNELS
from model.ops import EAGER

# results that a core gives of its own part: (cores, ...), which the model merges
_BY_CORE = ("coupled_sample", "weights_above")
# of small operands one core does all
_IDLE = ("accept_drafts", "decode_mlp")


def _outputs(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", CASES)
def test_two_cores_give_the_bits_of_one(name: str) -> None:
    ran = set[str]()

    def serve(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert launch.lnc == LNC, "a kernel runs on the cores of a build"
        arrays, kernel = [t.clone(memory_format=torch.contiguous_format).numpy() for t in tensors], launch.kernel
        alone, policy = copy.deepcopy(arrays), nkisim.Policy(recording=True)
        two, one = (
            nkisim.run(KERNELS[kernel][cores], filled(launch.arguments, operands), policy=policy)
            for cores, operands in ((LNC, arrays), (1, alone))
        )
        ran.add(kernel)
        if kernel not in _BY_CORE:
            for a, b in zip(_outputs(two.outputs), _outputs(one.outputs), strict=True):
                assert a.tobytes() == b.tobytes()
        for a, b in zip(arrays, alone, strict=True):
            assert a.tobytes() == b.tobytes()
        assert ({e.core for e in two.recording.events} == {0}) == (kernel in _IDLE)
        results = _outputs(two.outputs)[: len(launch.results)]
        return tuple(torch.from_numpy(np.asarray(a)) for a in (*results, *(arrays[i] for i in launch.changed)))

    with torch.no_grad():
        CASES[name](make_context("nki", 1, EAGER, serve, layers=3))
    assert ran
