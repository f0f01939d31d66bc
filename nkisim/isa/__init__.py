"""nki.isa simulated: one file per engine, names, order and defaults of the manual."""

from nkisim.enums import (
    dge_mode as dge_mode,
)
from nkisim.enums import (
    dma_engine as dma_engine,
)
from nkisim.enums import (
    engine as engine,
)
from nkisim.enums import (
    gpsimd_engine as gpsimd_engine,
)
from nkisim.enums import (
    matmul_perf_mode as matmul_perf_mode,
)
from nkisim.enums import (
    nc_version as nc_version,
)
from nkisim.enums import (
    oob_mode as oob_mode,
)
from nkisim.enums import (
    reduce_cmd as reduce_cmd,
)
from nkisim.enums import (
    scalar_engine as scalar_engine,
)
from nkisim.enums import (
    tensor_engine as tensor_engine,
)
from nkisim.enums import (
    unknown_engine as unknown_engine,
)
from nkisim.enums import (
    vector_engine as vector_engine,
)
from nkisim.errors import NkiValidationError as NkiValidationError
from nkisim.instruction import NkiInstruction as NkiInstruction
from nkisim.isa.copies import (
    memset as memset,
)
from nkisim.isa.copies import (
    nc_stream_shuffle as nc_stream_shuffle,
)
from nkisim.isa.copies import (
    range_select as range_select,
)
from nkisim.isa.copies import (
    select_reduce as select_reduce,
)
from nkisim.isa.copies import (
    tensor_copy as tensor_copy,
)
from nkisim.isa.copies import (
    tensor_copy_predicated as tensor_copy_predicated,
)
from nkisim.isa.dma import (
    dma_compute as dma_compute,
)
from nkisim.isa.dma import (
    dma_copy as dma_copy,
)
from nkisim.isa.dma import (
    dma_transpose as dma_transpose,
)
from nkisim.isa.gpsimd import (
    affine_select as affine_select,
)
from nkisim.isa.gpsimd import (
    iota as iota,
)
from nkisim.isa.gpsimd import (
    local_gather as local_gather,
)
from nkisim.isa.gpsimd import (
    nc_n_gather as nc_n_gather,
)
from nkisim.isa.gpsimd import (
    nonzero_with_count as nonzero_with_count,
)
from nkisim.isa.gpsimd import (
    sequence_bounds as sequence_bounds,
)
from nkisim.isa.gpsimd import (
    tensor_partition_reduce as tensor_partition_reduce,
)
from nkisim.isa.gpsimd import (
    topk as topk,
)
from nkisim.isa.newer import (
    activate2 as activate2,
)
from nkisim.isa.newer import (
    exponential as exponential,
)
from nkisim.isa.newer import (
    nc_matmul_mx as nc_matmul_mx,
)
from nkisim.isa.newer import (
    quantize_mx as quantize_mx,
)
from nkisim.isa.newer import (
    rand2 as rand2,
)
from nkisim.isa.registers import (
    register_alloc as register_alloc,
)
from nkisim.isa.registers import (
    register_load as register_load,
)
from nkisim.isa.registers import (
    register_move as register_move,
)
from nkisim.isa.registers import (
    register_store as register_store,
)
from nkisim.isa.rng import (
    dropout as dropout,
)
from nkisim.isa.rng import (
    rand_get_state as rand_get_state,
)
from nkisim.isa.rng import (
    rand_set_state as rand_set_state,
)
from nkisim.isa.rng import (
    rng as rng,
)
from nkisim.isa.rng import (
    set_rng_seed as set_rng_seed,
)
from nkisim.isa.scalar import (
    activation as activation,
)
from nkisim.isa.scalar import (
    activation_reduce as activation_reduce,
)
from nkisim.isa.scans import (
    tensor_scalar_cumulative as tensor_scalar_cumulative,
)
from nkisim.isa.scans import (
    tensor_tensor_scan as tensor_tensor_scan,
)
from nkisim.isa.statistics import (
    bn_aggr as bn_aggr,
)
from nkisim.isa.statistics import (
    bn_stats as bn_stats,
)
from nkisim.isa.statistics import (
    max8 as max8,
)
from nkisim.isa.statistics import (
    nc_find_index8 as nc_find_index8,
)
from nkisim.isa.statistics import (
    nc_match_replace8 as nc_match_replace8,
)
from nkisim.isa.statistics import (
    reciprocal as reciprocal,
)
from nkisim.isa.sync import (
    core_barrier as core_barrier,
)
from nkisim.isa.sync import (
    sendrecv as sendrecv,
)
from nkisim.isa.target import (
    get_nc_sub_version as get_nc_sub_version,
)
from nkisim.isa.target import (
    get_nc_version as get_nc_version,
)
from nkisim.isa.tensor import (
    nc_matmul as nc_matmul,
)
from nkisim.isa.tensor import (
    nc_transpose as nc_transpose,
)
from nkisim.isa.vector import (
    scalar_tensor_tensor as scalar_tensor_tensor,
)
from nkisim.isa.vector import (
    tensor_reduce as tensor_reduce,
)
from nkisim.isa.vector import (
    tensor_scalar as tensor_scalar,
)
from nkisim.isa.vector import (
    tensor_scalar_reduce as tensor_scalar_reduce,
)
from nkisim.isa.vector import (
    tensor_tensor as tensor_tensor,
)
from nkisim.objects import (
    NKIObject as NKIObject,
)
from nkisim.objects import (
    VirtualRegister as VirtualRegister,
)
from nkisim.tokens import TOKENS as _TOKENS

equal, maximum = _TOKENS["equal"], _TOKENS["maximum"]
