"""The plan of the full pair by independent arithmetic, and the head map of every preset."""

import pytest

from compile.plan import make_plan
from compile.spec import BuildSpec
from model.config import PRESETS
from model.parallel import HeadMap


def test_full_pair_at_tp_32() -> None:
    plan = make_plan(BuildSpec())
    # 32B: 2 of 64 query heads, one of 8 kv heads (4 copies), 800 of 25600, 160 of 5120 embedded, 4748 logits
    layer = 2 * 5120 * 256 + 2 * 5120 * 128 + 3 * 5120 * 800 + 2 * 5120 + 2 * 128
    target = 64 * layer + 151936 * 160 + 4748 * 5120 + 5120
    # 1.7B: 16 heads over 32 ranks: one head a rank, zero on half of them
    layer = 2 * 2048 * 128 + 2 * 2048 * 128 + 3 * 2048 * 192 + 2 * 2048 + 2 * 128
    draft = 28 * layer + 151936 * 64 + 4748 * 2048 + 2048
    # and each model's int32 number of the rank
    assert plan.weight_bytes == 2 * (target + draft) + 2 * 4
    assert plan.cache_bytes == 2 * 2 * 4 * 1024 * 128 * (64 + 28)
    assert [g.bucket for g in plan.graphs[::3]] == [128, 256, 512, 1024]
    fused = plan.graphs[1]
    assert fused.collectives == {"all-reduce": 2 * (64 + 8 * 28), "all-gather": 1 + 8 + 1 + 7}


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", PRESETS)
def test_every_query_head_is_held_once_beside_its_kv_head(name: str, tp: int) -> None:
    config = PRESETS[name]
    heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, tp)
    held: list[int] = []
    for rank in range(tp):
        queries, kv = heads.queries_of(rank), heads.kv_of(rank)
        assert (len(queries), len(kv)) == (heads.heads_per_rank, heads.kv_per_rank)
        for slot, query in enumerate(queries):
            if query is not None:
                assert query // config.group == kv[slot // heads.heads_per_kv]
                held.append(query)
    assert sorted(held) == list(range(config.num_attention_heads))


def test_head_map_of_a_padded_draft_is_nxdis() -> None:
    heads = HeadMap(16, 8, 32)
    assert [heads.queries_of(r) for r in range(8)] == [[0], [1], [None], [None], [2], [3], [None], [None]]
    assert [heads.kv_of(r)[0] for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
