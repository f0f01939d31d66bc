"""The table of cost laws: which law an operation has on which engine."""

from __future__ import annotations

from nkisim.errors import NotSimulated
from nkisim.timeline.costs.engines import Law, matmul, scalar, vector, vector_cycles, vector_eight, vector_scan, words
from nkisim.timeline.costs.gpsimd import barrier, gather, gpsimd, gpsimd_cycles, register, topk

_SEARCH = gpsimd_cycles("gpsimd_search_cycles")

# the law of every operation by engine; "*" is every other operation of that engine
LAWS: dict[str, dict[str, Law]] = {
    "tensor": {"nc_matmul": matmul, "nc_transpose": matmul},
    "vector": {
        "reciprocal": vector_cycles("vector_reciprocal_cycles"),
        "tensor_tensor_scan": vector_scan,
        "tensor_scalar_cumulative": vector_scan,
        "rng": vector_cycles("vector_rng_cycles"),
        **dict.fromkeys(words("max8 nc_find_index8 nc_match_replace8"), vector_eight),
        **dict.fromkeys(
            words(
                "tensor_copy tensor_copy_predicated memset nc_transpose tensor_tensor "
                "tensor_scalar "
                "scalar_tensor_tensor tensor_reduce tensor_scalar_reduce bn_stats bn_aggr "
                "dropout select_reduce range_select "
                "nc_stream_shuffle set_rng_seed"
            ),
            vector,
        ),
    },
    "scalar": dict.fromkeys(words("activation activation_reduce tensor_copy tensor_scalar"), scalar),
    "gpsimd": {
        "topk": topk,
        "nc_n_gather": gather,
        "tensor_partition_reduce": gpsimd_cycles("gpsimd_partition_reduce_cycles"),
        **dict.fromkeys(words("local_gather sequence_bounds nonzero_with_count rng"), _SEARCH),
        **dict.fromkeys(
            words("tensor_copy memset tensor_tensor tensor_scalar iota affine_select rand_set_state rand_get_state"),
            gpsimd,
        ),
    },
}
# operations that any sequencer can run
ANYWHERE: dict[str, Law] = {
    "core_barrier": barrier,
    **dict.fromkeys(words("register_alloc register_move register_load register_store"), register),
    **dict.fromkeys(words("scalar_load scalar_store all_gather_v_prepare all_to_all_v_prepare"), register),
}


def law_of(engine: str, op: str) -> Law:
    """The law of one operation on one engine.

    Raises:
        NotSimulated: no law is known, so the timeline would be a guess.
    """
    law = LAWS.get(engine, {}).get(op) or ANYWHERE.get(op)
    if law is None:
        raise NotSimulated(op, "time", f"no cost law for it on the {engine} engine")
    return law
