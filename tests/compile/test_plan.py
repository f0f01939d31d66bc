"""The plan of the full pair by independent arithmetic, its graphs, and the head map of every preset."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile.build import checked_plan
from compile.build import main as build
from compile.report import CAPACITY, hbm_text
from compile.spec import BuildSpec, Recipe
from model.config import PRESETS
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.parallel import HeadMap
from tests.compile.tiny import refused, write_model
from tests.model.heads import write_head
from trnspec.bundle.plan import make_plan

# hidden, intermediate, layers, query heads of each model card; 8 kv heads of 128 and 151936 tokens everywhere
CARDS = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16), "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32), "Qwen/Qwen3-8B": (4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40), "Qwen/Qwen3-32B": (5120, 25600, 64, 64),
}  # fmt: skip


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
    # an even number of blocks of at most 512 ids and an even number of ids in each
    ids = 151936 // tp
    blocks = 2 * -(-ids // 1024)
    embeddings = ids * hidden + 2 * blocks * -(-ids // (2 * blocks)) * hidden
    return layers * layer + embeddings + hidden, layers * 2 * kv * 128


# each model at a tp below its kv heads, at them, and above; every tp; the default pair
TPS = [
    *((name, tp) for i, name in enumerate(CARDS) for tp in (2 << i % 3, 8 << i % 4)),
    (BuildSpec.target, BuildSpec.tp),
]


@pytest.mark.parametrize(("name", "tp"), TPS)
def test_bytes_of_a_rank_are_those_of_arithmetic(name: str, tp: int) -> None:
    """Every model as target, and as draft, where 16 heads are padded at tp 32 and 64 (40 heads from tp 16 on)."""
    target, draft = (name, "Qwen/Qwen3-1.7B") if name != "Qwen/Qwen3-1.7B" else ("Qwen/Qwen3-32B", name)
    plan = make_plan(BuildSpec(target=target, draft=draft, tp=tp, batch=3, max_len=512).bundle)
    weights, cached = (sum(n) for n in zip(_numbers(target, tp), _numbers(draft, tp), strict=True))
    assert plan.weight_bytes == 2 * weights + 2 * 4
    # blocks of 128 positions: four for each of three sequences, and three for none
    assert plan.cache_bytes == 2 * (3 + 3 * 4) * 128 * cached + 3 * 4
    fused = plan.by_key[GraphKey(Stage.STEP, 7, 512)]
    assert sum(2 * math.prod(t.shape) for t in fused.weights if t.dtype == "bfloat16") == 2 * weights


@pytest.mark.parametrize("changes", [{}, {"k": "0"}, {"drafter": "ngram", "k": "3"}], ids=str)
def test_the_graphs_of_a_bundle(changes: dict[str, Any]) -> None:
    """Prompts by rows and keys; steps of each k and of 0; halves for logits processors."""
    spec = BuildSpec(**changes, max_len=8192, recipe=Recipe(chunks=(128, 512))).bundle
    plan = make_plan(spec)
    assert spec.buckets == (2048, 8192)
    prompts = [(k.rows, k.bucket) for k in plan.by_key if k.stage is Stage.PREFILL]
    assert prompts == [(128, 2048), (128, 8192), (512, 8192)]
    assert [(k.rows, k.bucket) for k in plan.by_key if k.stage is Stage.PREFILL_LOGPROBS] == [(512, 8192)]
    for key, graph in plan.by_key.items():
        if key.stage is Stage.VERIFY and spec.has_draft:
            draft, fused = (plan.by_key[key._replace(stage=s)] for s in (Stage.DRAFT, Stage.STEP))
            assert {*draft.weights, *graph.weights} == {*fused.weights}
            assert {*fused.state} < {*draft.state, *graph.state}
    stages = {key.stage for key in plan.by_key}
    halves = {Stage.DRAFT, Stage.VERIFY} if spec.has_draft else {Stage.VERIFY}
    assert stages == {Stage.PREFILL, Stage.PREFILL_LOGPROBS, Stage.STEP, *halves}


@pytest.mark.parametrize("kernels", ["reference", "nki"])
@pytest.mark.parametrize(("buckets", "limit"), [((1024,), 10), ((1024, 4096), 16), ((2048, 8192, 32768), 24)])
def test_how_many_graphs_a_bundle_has(buckets: tuple[int, ...], limit: int, kernels: str) -> None:
    """As many with kernels as without; greedy has a prompt, a step of k and one of 0."""
    every, greedy = (
        make_plan(BuildSpec(k="7", max_len=buckets[-1], kernels=kernels, recipe=Recipe(graphs=graphs)).bundle).graphs
        for graphs in ("all", "greedy")
    )
    assert len(every) <= limit
    assert {g.key.bucket for g in every if g.key.stage is Stage.STEP} == {*buckets}
    assert [g.key.name for g in greedy] == [
        f"{name}_bk{buckets[-1]}" for name in ("prefill_k7_r512", "step_k7_unfiltered", "step_k0_unfiltered")
    ]


def test_a_set_of_k_has_a_graph_for_each_and_one_copy_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = make_plan(BuildSpec(k="7").bundle), make_plan(BuildSpec(k="1,7,3").bundle)
    assert (several.weight_bytes, several.cache_bytes) == (one.weight_bytes, one.cache_bytes)
    assert {g for g in one.graphs if g not in several.graphs} == set()
    added = [g.key for g in several.graphs if g not in one.graphs]
    assert added == [GraphKey(Stage.STEP, k, 1024, filters) for k in (3, 1) for filters in (True, False)]
    build(["--k", "7,0,1,3", "--dry-run"])
    assert "or fewer by a graph of k 0, 1, 3" in capsys.readouterr().out
    build(["--k", "0,3", "--dry-run", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ks"], printed["spec"]["ks"]) == ([0, 3], [3])
    assert printed["graphs"] == [g.file for g in make_plan(BuildSpec(k="3").bundle).graphs]


def test_a_rank_s_hbm_has_what_is_published(capsys: pytest.CaptureFixture[str]) -> None:
    """In the plan, and in a refusal of what would fit without it."""
    build(["--k", "7", "--dry-run"])
    text = (
        "7.3 of 25.8 GB: weights 2.17, draft 0.16, caches 0.21, code 1.25, rings 3.00, scratch 0.33, fixed 0.14 (code"
    )
    assert text in capsys.readouterr().out
    build(["--k", "7", "--dry-run", "--json"])
    sizes = json.loads(capsys.readouterr().out)["bytes_per_rank"]
    assert (sizes["code"], sizes["rings"]) == (2 * 96_000_000 + 9 * 118_000_000, 9 * 333_000_000)
    tight = BuildSpec(k="7", tp=4, max_len=16384)
    plan = make_plan(tight.bundle)
    assert plan.weight_bytes + plan.cache_bytes < CAPACITY
    refused(
        lambda: checked_plan(tight), "a rank needs ", " of 25.8 GB: weights 16.38, draft 1.02, ", "; raise --tp, lower"
    )


@pytest.mark.parametrize(("tp", "weights"), [(4, "weights 16.38, draft 1.02, "), (8, "weights 8.19, draft 0.51, ")])
def test_one_chip_and_two_hold_the_32b_with_its_draft(tp: int, weights: str) -> None:
    """Every graph of k 7 at each batch of 1024 positions; at 32768 the blocks that fit, and no block more."""
    for batch in (1, 4, 8, 16):
        assert f" of 25.8 GB: {weights}caches " in hbm_text(checked_plan(BuildSpec(tp=tp, batch=batch, k="7")))
    long = BuildSpec(tp=tp, batch=4, k="7", max_len=32768, recipe=Recipe(chunks=(512,), context_buckets=(32768,)))
    if tp == 8:
        return checked_plan(long) and None
    with pytest.raises(UserError, match="give at most") as refusal:
        checked_plan(long)
    blocks = int(re.findall(r"at most (\d+) blocks", str(refusal.value))[0])
    # more than one sequence of 32768 positions
    assert blocks > 1.2 * 32768 / 128
    of = {more: replace(long, recipe=replace(long.recipe, blocks=blocks + more)) for more in (0, 1)}
    assert checked_plan(of[0])
    refused(lambda: checked_plan(of[1]), f"at most {blocks} blocks by --recipe")
    refused(lambda: checked_plan(replace(long, recipe=Recipe())), "have fewer graphs: one --k, and context_buckets and")


def test_k_unless_given(tmp_path: Path) -> None:
    """Two for a chain, between which a server chooses; one for an EAGLE-3 head."""
    target = write_model(tmp_path / "target", 1)
    eagle3 = {"target": str(target), "draft": str(write_head(tmp_path / "eagle3", target, taps=(0, 1)))}
    cases: list[tuple[dict[str, str], tuple[int, ...]]] = [
        ({}, (3, 7)), ({"drafter": "ngram"}, (7,)), ({"drafter": "none"}, ()), ({"k": "0"}, ()),
        (eagle3, (4,)), (eagle3 | {"k": "2,5"}, (2, 5)),
    ]  # fmt: skip
    for changes, ks in cases:
        spec = BuildSpec(tp=1, max_len=128, kernels="reference", **changes)  # type: ignore[arg-type]
        spec.check()
        assert spec.bundle.ks == ks


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", PRESETS)
def test_every_query_head_is_on_a_rank_of_its_kv_head(name: str, tp: int) -> None:
    config, stored = PRESETS[name], list[int]()
    group = config.num_attention_heads // config.num_key_value_heads
    heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, tp)
    for rank in range(tp):
        queries, kv = heads.queries_of(rank), heads.kv_of(rank)
        assert (len(queries), len(kv)) == (heads.heads_per_rank, heads.kv_per_rank)
        for slot, query in enumerate(queries):
            if query is not None:
                assert query // group == kv[slot // heads.heads_per_kv]
                stored.append(query)
    assert sorted(stored) == list(range(config.num_attention_heads))
