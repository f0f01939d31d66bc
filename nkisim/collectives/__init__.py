"""nki.collectives over simulated ranks in one process; see nkisim.ranks for launching them."""

from nkisim.collectives.dense import all_gather, all_reduce, all_to_all, reduce_scatter
from nkisim.collectives.exchange import ReplicaGroup, rg_partition_op
from nkisim.collectives.rings import (
    collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id,
    collective_permute_implicit_reduce,
    rank_id,
)
from nkisim.collectives.variable import (
    all_gather_v,
    all_gather_v_prepare,
    all_gather_v_trigger,
    all_to_all_v,
    all_to_all_v_prepare,
    all_to_all_v_trigger,
)

__all__ = [
    "ReplicaGroup",
    "all_gather",
    "all_gather_v",
    "all_gather_v_prepare",
    "all_gather_v_trigger",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "all_to_all_v_prepare",
    "all_to_all_v_trigger",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
    "rg_partition_op",
]
