"""The kernels that a launch can name; a graph's kernels are looked up here, and nowhere else."""

from typing import Any

from nki_kernels.attention.append_rows import append_rows_kernel
from nki_kernels.attention.prompt import prompt_attention_kernel
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.layer.attention import decode_attention_kernel
from nki_kernels.layer.decode_layers import decode_layers_kernel
from nki_kernels.layer.mlp import decode_mlp_kernel
from nki_kernels.layer.prompt_matmul import prompt_mlp_kernel, prompt_product_kernel
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import gumbel_noise_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel

KERNELS: dict[str, Any] = {
    "accept_drafts": accept_drafts_kernel,
    "append_rows": append_rows_kernel,
    "coupled_sample": coupled_sample_kernel,
    "decode_attention": decode_attention_kernel,
    "decode_layers": decode_layers_kernel,
    "decode_mlp": decode_mlp_kernel,
    "gumbel_noise": gumbel_noise_kernel,
    "prompt_attention": prompt_attention_kernel,
    "prompt_mlp": prompt_mlp_kernel,
    "prompt_product": prompt_product_kernel,
    "verify_attention": verify_attention_kernel,
    "weights_above": weights_above_kernel,
}
