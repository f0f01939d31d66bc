"""Launches served by nkisim: the only file of the model that runs the simulator."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import nkisim
from model.nki.launches import Launch
from model.nki.table import run, run_on_tensors


def simulate(launch: Launch, operands: Sequence[Any]) -> list[Any]:
    """Serve a launch on numpy arrays, which stay as they are."""
    return run(launch, operands, nkisim.simulate)


def serve(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Serve a launch of torch tensors at once."""
    return run_on_tensors(launch, tensors, nkisim.simulate)
