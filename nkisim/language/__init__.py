"""nki.language simulated: dtypes, memories, creation, math, loops."""

import nkisim.language.elementwise as _elementwise
from nkisim.isa.tokens import TOKENS as _TOKENS
from nkisim.language.creation import (
    full as full,
)
from nkisim.language.creation import (
    ndarray as ndarray,
)
from nkisim.language.creation import (
    ones as ones,
)
from nkisim.language.creation import (
    rand as rand,
)
from nkisim.language.creation import (
    random_seed as random_seed,
)
from nkisim.language.creation import (
    shared_constant as shared_constant,
)
from nkisim.language.creation import (
    shared_identity_matrix as shared_identity_matrix,
)
from nkisim.language.creation import (
    zeros as zeros,
)
from nkisim.language.creation import (
    zeros_like as zeros_like,
)
from nkisim.language.dtypes import *  # noqa: F403
from nkisim.language.grids import (
    NkiBlockGrid as NkiBlockGrid,
)
from nkisim.language.grids import (
    NkiGrid as NkiGrid,
)
from nkisim.language.grids import (
    NkiTileGrid as NkiTileGrid,
)
from nkisim.language.grids import (
    alloc_blocks as alloc_blocks,
)
from nkisim.language.grids import (
    alloc_tiles as alloc_tiles,
)
from nkisim.language.grids import (
    blocks as blocks,
)
from nkisim.language.grids import (
    empty_like as empty_like,
)
from nkisim.language.grids import (
    tiles as tiles,
)
from nkisim.language.loops import (
    affine_range as affine_range,
)
from nkisim.language.loops import (
    ds as ds,
)
from nkisim.language.loops import (
    dynamic_range as dynamic_range,
)
from nkisim.language.loops import (
    fori_loop as fori_loop,
)
from nkisim.language.loops import (
    no_reorder as no_reorder,
)
from nkisim.language.loops import (
    sequential_range as sequential_range,
)
from nkisim.language.loops import (
    static_range as static_range,
)
from nkisim.language.loops import (
    while_loop as while_loop,
)
from nkisim.language.spmd import (
    _TileSize as _TileSize,
)
from nkisim.language.spmd import (
    hbm as hbm,
)
from nkisim.language.spmd import (
    is_hbm as is_hbm,
)
from nkisim.language.spmd import (
    is_on_chip as is_on_chip,
)
from nkisim.language.spmd import (
    is_psum as is_psum,
)
from nkisim.language.spmd import (
    is_sbuf as is_sbuf,
)
from nkisim.language.spmd import (
    num_programs as num_programs,
)
from nkisim.language.spmd import (
    private_hbm as private_hbm,
)
from nkisim.language.spmd import (
    program_id as program_id,
)
from nkisim.language.spmd import (
    program_ndim as program_ndim,
)
from nkisim.language.spmd import (
    psum as psum,
)
from nkisim.language.spmd import (
    sbuf as sbuf,
)
from nkisim.language.spmd import (
    shared_hbm as shared_hbm,
)
from nkisim.language.spmd import (
    tile_size as tile_size,
)
from nkisim.language.whole import (
    broadcast_to as broadcast_to,
)
from nkisim.language.whole import (
    device_print as device_print,
)
from nkisim.language.whole import (
    dropout as dropout,
)
from nkisim.language.whole import (
    expand_dims as expand_dims,
)
from nkisim.language.whole import (
    gather_flattened as gather_flattened,
)
from nkisim.language.whole import (
    load as load,
)
from nkisim.language.whole import (
    load_transpose2d as load_transpose2d,
)
from nkisim.language.whole import (
    matmul as matmul,
)
from nkisim.language.whole import (
    rms_norm as rms_norm,
)
from nkisim.language.whole import (
    softmax as softmax,
)
from nkisim.language.whole import (
    store as store,
)
from nkisim.language.whole import (
    transpose as transpose,
)
from nkisim.language.whole import (
    where as where,
)
from nkisim.memory.tensor import NkiTensor as NkiTensor
from nkisim.objects import (
    MemoryRegion as MemoryRegion,
)
from nkisim.objects import (
    NKIObject as NKIObject,
)

# older spelling of a loop
range = range  # noqa: PLW0127

# importing it makes the math names executable
assert callable(_elementwise.run)

globals().update(_TOKENS, bool="bool")
