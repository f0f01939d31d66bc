"""The table of kernels that a launch can name, and launches on the host's arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.dtypes import BY_NAME
from model.nki.launches import Launch, filled, like
from nki_kernels.attention.append_rows import append_rows_kernel
from nki_kernels.attention.prompt import prompt_attention_kernel
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.layer.attention import decode_attention_kernel
from nki_kernels.layer.decode_layers import decode_layers_kernel
from nki_kernels.layer.mlp import decode_mlp_kernel
from nki_kernels.layer.prompt_matmul import prompt_mlp_kernel, prompt_product_kernel
from nki_kernels.layer.prompt_qkv import prompt_qkv_kernel
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import gumbel_noise_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel

KERNELS: dict[str, Any] = {
    "accept_drafts": accept_drafts_kernel, "append_rows": append_rows_kernel, "coupled_sample": coupled_sample_kernel,
    "decode_attention": decode_attention_kernel, "decode_layers": decode_layers_kernel, "decode_mlp": decode_mlp_kernel,
    "gumbel_noise": gumbel_noise_kernel, "prompt_attention": prompt_attention_kernel, "prompt_mlp": prompt_mlp_kernel,
    "prompt_product": prompt_product_kernel, "prompt_qkv": prompt_qkv_kernel,
    "verify_attention": verify_attention_kernel, "weights_above": weights_above_kernel,
}  # fmt: skip

# makes a kernel callable: the simulator's wrapper, or the identity with the vendor's nki
Runner = Callable[[Any], Any]


def run(launch: Launch, operands: Sequence[Any], runner: Runner) -> list[Any]:
    """Runs a launch on NumPy arrays, which it does not modify. Returns the results, then the updated arrays."""
    arrays = [a.copy() if i in launch.changed else a for i, a in enumerate(operands)]
    outputs = runner(KERNELS[launch.kernel][launch.lnc])(*filled(launch.arguments, arrays))
    results = (outputs if isinstance(outputs, tuple) else (outputs,))[: len(launch.results)]
    return [*results, *(arrays[i] for i in launch.changed)]


def run_on_tensors(
    launch: Launch, tensors: Sequence[Tensor], runner: Runner = lambda kernel: kernel
) -> tuple[Tensor, ...]:
    """`run` on torch tensors."""
    # through bytes: NumPy and torch have no common bfloat16
    arrays = [t.detach().contiguous().view(torch.uint8).numpy().view(BY_NAME[like(t).dtype].numpy) for t in tensors]
    results = (np.ascontiguousarray(array) for array in run(launch, arrays, runner))
    return tuple(torch.from_numpy(a.view(np.uint8)).view(BY_NAME[a.dtype.name].torch) for a in results)
