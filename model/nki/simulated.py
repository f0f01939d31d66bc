"""Launches served by nkisim: the only file of the model that sees the kernels and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import nkisim
from model.nki.launches import Launch, filled
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.layer.attention import decode_attention_kernel
from nki_kernels.layer.mlp import decode_mlp_kernel
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.accept_rejection import accept_rejection_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import gumbel_noise_kernel
from nki_kernels.sampling.rejection_sample import rejection_sample_kernel
from nki_kernels.sampling.uniform import uniform_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel

KERNELS = {
    "accept_drafts": accept_drafts_kernel,
    "accept_rejection": accept_rejection_kernel,
    "coupled_sample": coupled_sample_kernel,
    "decode_attention": decode_attention_kernel,
    "decode_mlp": decode_mlp_kernel,
    "gumbel_noise": gumbel_noise_kernel,
    "rejection_sample": rejection_sample_kernel,
    "uniform": uniform_kernel,
    "verify_attention": verify_attention_kernel,
    "weights_above": weights_above_kernel,
}


def simulate(launch: Launch, operands: Sequence[Any]) -> list[Any]:
    """Serve a launch on numpy arrays, which stay as they are, through nkisim."""
    arrays = [a.copy() if i in launch.changed else a for i, a in enumerate(operands)]
    arguments = filled(launch.arguments, arrays)
    found = nkisim.simulate(KERNELS[launch.kernel])(*arguments)
    results = found if isinstance(found, tuple) else (found,)
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
