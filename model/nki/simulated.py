"""Launches served by nkisim: the only file of the model that runs the simulator."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import nkisim
from model.nki.launches import Launch, filled
from model.nki.table import KERNELS


def simulate(launch: Launch, operands: Sequence[Any]) -> list[Any]:
    """Serve a launch on numpy arrays, which stay as they are, through nkisim."""
    arrays = [a.copy() if i in launch.changed else a for i, a in enumerate(operands)]
    arguments = filled(launch.arguments, arrays)
    found = nkisim.simulate(KERNELS[launch.kernel][launch.lnc])(*arguments)
    results = (found if isinstance(found, tuple) else (found,))[: len(launch.results)]
    return [*results, *(arrays[i] for i in launch.changed)]


def serve(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Serve a launch of torch tensors at once."""
    return tuple(_tensor(a) for a in simulate(launch, [_array(t) for t in tensors]))


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensor(array: Any) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
