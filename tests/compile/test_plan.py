"""The plan of the full pair by independent arithmetic, and the head map of every preset."""

import json
from dataclasses import replace
from typing import Any

import pytest

from compile.build import main as build
from compile.spec import BuildSpec
from model.config import PRESETS
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.parallel import HeadMap
from trnspec.bundle.plan import make_plan, whole_prompts


def test_full_pair_at_tp_32() -> None:
    plan = make_plan(BuildSpec().bundle)
    # 32B: 2 of 64 query heads, one of 8 kv heads (4 copies), 800 of 25600, 160 of 5120 embedded, 4748 logits
    layer = 2 * 5120 * 256 + 2 * 5120 * 128 + 3 * 5120 * 800 + 2 * 5120 + 2 * 128
    target = 64 * layer + 151936 * 160 + 4748 * 5120 + 5120
    # 1.7B: 16 heads over 32 ranks: one head a rank, zero on half of them
    layer = 2 * 2048 * 128 + 2 * 2048 * 128 + 3 * 2048 * 192 + 2 * 2048 + 2 * 128
    draft = 28 * layer + 151936 * 64 + 4748 * 2048 + 2048
    # and each model's int32 number of the rank
    assert plan.weight_bytes == 2 * (target + draft) + 2 * 4
    # and an id of each of the four sequences
    assert plan.cache_bytes == 2 * 2 * 33 * 128 * 128 * (64 + 28) + 4 * 4
    assert {g.key.bucket for g in plan.graphs} == {128, 256, 512, 1024}
    fused = plan.by_key[GraphKey(Stage.STEP, 7, 128)]
    assert fused.collectives == {"all-reduce": 2 * (64 + 7 * 28), "all-gather": 1 + 7 + 1 + 7}


@pytest.mark.parametrize(
    ("changes", "apart"), [({}, True), ({"k": "0"}, False), ({"drafter": "ngram"}, False)], ids=str
)
def test_each_prompt_has_a_graph_of_the_target_and_one_of_the_draft(changes: dict[str, Any], apart: bool) -> None:
    """Together they hold what a graph of both does; the draft's serves prompts that ask, too."""
    plan = make_plan(BuildSpec(**changes).bundle)
    of_draft = [key for key in plan.by_key if key.stage is Stage.PREFILL_DRAFT]
    prompts = [key for key in plan.by_key if key.stage is Stage.PREFILL and not key.asking]
    assert [key._replace(stage=Stage.PREFILL) for key in of_draft] == prompts * apart
    whole = whole_prompts(plan)[-1]
    for key in prompts:
        graphs = [plan.by_key[k] for k in (key._replace(stage=Stage.PREFILL_DRAFT), key) if k in plan.by_key]
        assert sum((g.weights for g in graphs), ()) == whole.weights
        assert sum((g.state for g in graphs), ()) == whole.state
        assert {op: sum(g.collectives[op] for g in graphs) for op in whole.collectives} == whole.collectives


# hidden, intermediate, layers, query heads of each model card; 8 kv heads of 128 and 151936 tokens everywhere
CARDS = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64),
}


def _numbers(name: str, tp: int) -> tuple[int, int]:
    """Numbers of weights and, for one token of one sequence, of caches on one rank."""
    hidden, intermediate, layers, queries = CARDS[name]
    if tp <= 8:
        kv, q = 8 // tp, queries // tp
    else:
        # a kv head lies on tp / 8 ranks, which share out its query heads, rounded up with zero heads
        kv, q = 1, -(-(queries // 8) // (tp // 8))
    attention = 2 * hidden * 128 * (q + kv) + 2 * 128
    layer = attention + 3 * hidden * (intermediate // tp) + 2 * hidden
    embeddings = 151936 * (hidden // tp) + (151936 // tp) * hidden
    return layers * layer + embeddings + hidden, layers * 2 * kv * 128


def _bytes(tensors: list[Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for _, shape, dtype in tensors:
        size = {"bfloat16": 2, "int32": 4}[dtype]
        for extent in shape:
            size *= extent
        total[dtype] = total.get(dtype, 0) + size
    return total


# each model at a tp below its kv heads, at them, and above; every tp
@pytest.mark.parametrize(
    ("name", "tp"),
    [(name, tp) for i, name in enumerate(CARDS) for tp in (2 << i % 3, 8 << i % 4)],
)
def test_bytes_of_a_rank_are_those_of_arithmetic(name: str, tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every model as target, and as draft, where 16 heads are padded at tp 32 and 64 (40 heads from tp 16 on)."""
    target, draft = (name, "Qwen/Qwen3-1.7B") if name != "Qwen/Qwen3-1.7B" else ("Qwen/Qwen3-32B", name)
    build(["--target", target, "--draft", draft, "--tp", str(tp), "--batch", "3", "--max-len", "512", "--dry-run",
           "--json"])  # fmt: skip
    printed = json.loads(capsys.readouterr().out)
    fused = next(g for g in printed["graphs"] if g["stage"] == "step" and g["k"])
    weights, cached = (sum(n) for n in zip(_numbers(target, tp), _numbers(draft, tp), strict=True))
    stored = _bytes(fused["weights"])
    assert stored["bfloat16"] == 2 * weights
    # blocks of 128 positions: four for each of three sequences, and one for none
    pools = 2 * (1 + 3 * 4) * 128 * cached
    assert printed["bytes_per_rank"] == {"weights": sum(stored.values()), "caches": pools + 3 * 4}
    assert _bytes(fused["state"]) == {"bfloat16": pools, "int32": 3 * 4}


def test_a_rank_that_cannot_hold_its_part_is_refused_with_the_sum() -> None:
    said = r"17\.4 GB of weights and 49\.4 GB of caches, together 66\.8 GB, and a logical core has 25\.8; raise --tp"
    with pytest.raises(UserError, match=said):
        build(["--tp", "4", "--k", "7", "--batch", "16", "--max-len", "32768", "--dry-run"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("Qwen/Qwen3-14B --tp 4 --dtype fp32", r"rows have 5120 numbers of fp32 .* hold 4096; use --dtype bf16"),
        ("Qwen/Qwen3-14B --tp 1 --k 0", r"inner rows have 17408 numbers of bf16 .* hold 12800; raise --tp"),
        ("Qwen/Qwen3-32B --tp 1 --k 0", r"rows of heads have 8192 numbers of bf16 .* hold 5120; raise --tp"),
    ],
)
def test_rows_that_a_prompt_s_kernels_cannot_hold_are_refused(asked: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(["--target", *asked.split(), "--kernels", "nki", "--dry-run"])


@pytest.mark.parametrize(
    "asked", ["Qwen/Qwen3-8B --tp 1", "Qwen/Qwen3-8B --tp 2 --dtype fp32", "Qwen/Qwen3-32B --tp 4"]
)
def test_the_presets_longest_rows_that_kernels_hold(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    build(["--target", *asked.split(), "--draft", "Qwen/Qwen3-0.6B", "--kernels", "nki", "--dry-run"])
    assert "graphs" in capsys.readouterr().out


def test_a_plan_for_people_names_padded_heads(capsys: pytest.CaptureFixture[str]) -> None:
    build(["--target", "Qwen/Qwen3-14B", "--tp", "32", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("14.8 B parameters, 40 layers, 40 heads padded to 64")
    assert lines[1].endswith("28 layers, 16 heads padded to 32")
    build(["--tp", "8", "--dry-run"])
    assert "padded" not in capsys.readouterr().out


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


def test_a_set_of_k_has_a_graph_for_each_and_one_copy_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = make_plan(BuildSpec(k="7").bundle), make_plan(BuildSpec(k="1,7,3").bundle)
    assert (several.weight_bytes, several.cache_bytes) == (one.weight_bytes, one.cache_bytes)
    assert {g for g in one.graphs if g not in several.graphs} == set()
    added = [g for g in several.graphs if g not in one.graphs and g.key.bucket == 128]
    assert [g.key for g in added] == [
        GraphKey(Stage.STEP, k, 128, filters) for k in (3, 1) for filters in (True, False)
    ]
    # two all-reduces a layer: 64 of the target's, and 28 of the draft's in each of its k passes
    assert [g.collectives["all-reduce"] for g in added[::2]] == [2 * (64 + 3 * 28), 2 * (64 + 28)]
    build(["--k", "7,0,1,3", "--dry-run"])
    assert "or fewer by a graph of k 0, 1, 3" in capsys.readouterr().out
    build(["--k", "0,3", "--dry-run", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ks"], printed["spec"]["ks"]) == ([0, 3], [3])


@pytest.mark.parametrize("ks", [(7, 3), (3, 1), (0, 3), (3, 3), (3, 32)])
def test_a_set_of_k_that_is_none_is_refused(ks: tuple[int, ...]) -> None:
    spec = BuildSpec().bundle
    replace(spec, ks=(3, 7)).check()
    with pytest.raises(UserError, match="different numbers, the largest last"):
        replace(spec, ks=ks).check()
