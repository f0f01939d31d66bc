"""nki.isa simulated: one file per engine, names, order and defaults of the manual."""

from nkisim import enums as _enums
from nkisim.enums import *  # noqa: F403
from nkisim.errors import NkiValidationError
from nkisim.isa.copies import (
    memset,
    nc_stream_shuffle,
    range_select,
    select_reduce,
    tensor_copy,
    tensor_copy_predicated,
)
from nkisim.isa.dma import dma_compute, dma_copy, dma_transpose
from nkisim.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
    tensor_partition_reduce,
    topk,
)
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.newer import activate2, exponential, nc_matmul_mx, quantize_mx, rand2
from nkisim.isa.registers import register_alloc, register_load, register_move, register_store, scalar_load, scalar_store
from nkisim.isa.rng import dropout, rand_get_state, rand_set_state, rng, set_rng_seed
from nkisim.isa.scalar import activation, activation_reduce
from nkisim.isa.scans import tensor_scalar_cumulative, tensor_tensor_scan
from nkisim.isa.statistics import bn_aggr, bn_stats, max8, nc_find_index8, nc_match_replace8, reciprocal
from nkisim.isa.sync import core_barrier, sendrecv, sendrecv_compute
from nkisim.isa.target import get_nc_sub_version, get_nc_version
from nkisim.isa.tensor import nc_matmul, nc_transpose
from nkisim.isa.tokens import TOKENS as _TOKENS
from nkisim.isa.vector import scalar_tensor_tensor, tensor_reduce, tensor_scalar, tensor_scalar_reduce, tensor_tensor
from nkisim.objects import NKIObject, NkiScalar, VirtualRegister

equal, maximum = _TOKENS["equal"], _TOKENS["maximum"]

__all__ = [
    "NKIObject", "NkiInstruction", "NkiScalar", "NkiValidationError", "VirtualRegister", "activate2", "activation",
    "activation_reduce", "affine_select", "bn_aggr", "bn_stats", "core_barrier", "dma_compute", "dma_copy",
    "dma_transpose", "dropout", "equal", "exponential", "get_nc_sub_version", "get_nc_version", "iota", "local_gather",
    "max8", "maximum", "memset", "nc_find_index8", "nc_match_replace8", "nc_matmul", "nc_matmul_mx", "nc_n_gather",
    "nc_stream_shuffle", "nc_transpose", "nonzero_with_count", "quantize_mx", "rand2", "rand_get_state",
    "rand_set_state", "range_select", "reciprocal", "register_alloc", "register_load", "register_move",
    "register_store", "rng", "scalar_load", "scalar_store", "scalar_tensor_tensor", "select_reduce", "sendrecv",
    "sendrecv_compute", "sequence_bounds", "set_rng_seed", "tensor_copy", "tensor_copy_predicated",
    "tensor_partition_reduce", "tensor_reduce", "tensor_scalar", "tensor_scalar_cumulative", "tensor_scalar_reduce",
    "tensor_tensor", "tensor_tensor_scan", "topk",
]  # fmt: skip
__all__ += _enums.__all__
