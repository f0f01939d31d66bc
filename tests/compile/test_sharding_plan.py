"""Draft groups and slices of the sequence before anything runs: bytes, collectives and their groups, refusals."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jaxlib import xla_client

from compile.build import main
from compile.graph.trace import lower_graph
from compile.neuron.config import render
from compile.plan import make_plan
from compile.spec import BuildSpec
from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.bundle.schema import UNFILTERED
from model.draft_config import Eagle3Config
from model.errors import UserError
from model.nki.filter_floor import ALL_GATHERS
from model.parallel import check_tp
from tests.compile.tiny import spec, write_model

BASIC = ["--tp", "32", "--k", "7", "--dry-run", "--json"]


def _planned(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    main([*BASIC, *flags])
    return json.loads(capsys.readouterr().out)


def test_full_pair_with_the_draft_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    planned = _planned(capsys, "--draft-tp", "4")
    # 32B on 32 ranks: 2 of 64 query heads, one of 8 kv heads, 800 of 25600, 160 of 5120 embedded, 4748 logits
    layer = 2 * 5120 * 256 + 2 * 5120 * 128 + 3 * 5120 * 800 + 2 * 5120 + 2 * 128
    target = 64 * layer + 151936 * 160 + 4748 * 5120 + 5120
    # 1.7B on 4 ranks: 4 of 16 query heads, 2 of 8 kv heads, 1536 of 6144, 512 of 2048 embedded; logits on all ranks
    layer = 2 * 2048 * 512 + 2 * 2048 * 256 + 3 * 2048 * 1536 + 2 * 2048 + 2 * 128
    draft = 28 * layer + 151936 * 512 + 4748 * 2048 + 2048
    assert planned["bytes_per_rank"]["weights"] == 2 * (target + draft) + 2 * 4
    in_group = _planned(capsys, "--draft-tp", "4", "--draft-head", "group")
    more = 2 * (37984 - 4748) * 2048
    assert in_group["bytes_per_rank"]["weights"] == planned["bytes_per_rank"]["weights"] + more
    # keys and values, bf16, batch 4, 1024 positions, D 128: one kv head of the target, two of the draft, and ids
    assert planned["bytes_per_rank"]["caches"] == 2 * 2 * 4 * 1024 * 128 * (64 + 2 * 28) + 4 * 4
    fused = planned["graphs"][1]
    assert fused["collectives"] == {"all-reduce": 2 * (64 + 7 * 28), "all-gather": 1 + 1 + 7 + 7}


def test_full_pair_with_slices_of_the_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    planned, default = _planned(capsys, "--kv-shard", "sequence"), _planned(capsys)
    assert planned["bytes_per_rank"]["weights"] == default["bytes_per_rank"]["weights"]
    # four ranks share a kv head of either model: 256 positions each
    assert planned["bytes_per_rank"]["caches"] == 2 * 2 * 4 * 256 * 128 * (64 + 28) + 4 * 4
    assert default["bytes_per_rank"]["caches"] == 2 * 2 * 4 * 1024 * 128 * (64 + 28) + 4 * 4
    fused = planned["graphs"][1]["collectives"]
    # a gather of queries and one of parts in every layer of every pass
    assert fused == {"all-reduce": 2 * (64 + 7 * 28), "all-gather": 1 + 1 + 7 + 7 + 2 * (64 + 7 * 28)}
    both = _planned(capsys, "--kv-shard", "sequence", "--draft-tp", "4")
    # a draft on four ranks holds each kv head once: its cache stays whole
    assert both["bytes_per_rank"]["caches"] == 2 * 2 * 4 * 128 * (256 * 64 + 1024 * 2 * 28) + 4 * 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2}
    write_model(folder / "target", 1, **sizes)
    write_model(folder / "draft", 2, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    return folder


def _collectives(proto: bytes) -> Counter[tuple[str, tuple[tuple[int, ...], ...]]]:
    """How often each collective runs, by its opcode and replica groups, with calls followed."""
    text = xla_client.XlaComputation(proto).as_hlo_text()
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            bodies[name] = []
        elif line.startswith("  "):
            bodies[name].append(line)
    entry = re.search(r"^ENTRY %?(\S+)", text, re.M)
    assert entry is not None

    def count(name: str) -> Counter[Any]:
        total: Counter[Any] = Counter()
        for line in bodies[name]:
            if (found := re.search(r" (all-reduce|all-gather)\(", line)) is not None:
                groups = re.search(r"replica_groups=\{(.*?\})\}", line)
                assert groups is not None
                listed = re.findall(r"\{([\d,]+)\}", groups[1])
                total[found[1], tuple(tuple(map(int, g.split(","))) for g in listed)] += 1
            elif " call(" in line:
                called = re.search(r"to_apply=%?([\w.\-]+)", line)
                assert called is not None
                total += count(called[1])
        return total

    return count(entry[1])


def _in(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + size)) for first in range(0, 8, size))


@pytest.mark.parametrize(
    ("draft_tp", "slices_of_draft", "head"), [(4, 2, 8), (4, 2, 4), (2, 1, 8), (1, 1, 8), (1, 1, 1)]
)
def test_each_collective_joins_the_promised_ranks(base: Path, draft_tp: int, slices_of_draft: int, head: int) -> None:
    """k 3, a target of two layers in four slices on 8 ranks, a draft of one layer, its head on 8 ranks or its group."""
    split = {"draft_tp": draft_tp, "draft_head": "all" if head == 8 else "group", "kv_shard": "sequence"}
    plan = make_plan(spec(base, tp=8, max_len=512, **split))
    drafts = {PREFILL: (1, 0), FUSED: (3, 3), DECODE: (0, 0)}
    for graph in plan.graphs[-6:]:
        passes, heads = drafts[graph.tag.removesuffix(UNFILTERED)]
        expected = Counter({("all-reduce", _in(8)): 4, ("all-gather", _in(8)): 2, ("all-gather", _in(4)): 4})
        if draft_tp > 1:
            expected += Counter({("all-reduce", _in(draft_tp)): 2 * passes})
            expected += Counter({("all-gather", _in(draft_tp)): passes})
        if head > 1:
            expected += Counter({("all-gather", _in(head)): heads})
        if slices_of_draft > 1:
            expected += Counter({("all-gather", _in(slices_of_draft)): 2 * passes})
        found = _collectives(lower_graph(plan, graph))
        assert found == expected
        for op, times in graph.collectives.items():
            assert sum(n for (name, _), n in found.items() if name == op) == times


def test_a_draft_of_the_targets_configuration_has_its_own_groups(base: Path) -> None:
    """Layers and models of one kind share a trace: not between models whose collectives join other ranks."""
    target = str(base / "target")
    plan = make_plan(spec(base, tp=8, draft=target, draft_tp=2))
    found = _collectives(lower_graph(plan, next(g for g in plan.graphs if g.tag == FUSED)))
    assert found["all-reduce", _in(8)] == 2 * 2
    assert found["all-reduce", _in(2)] == 2 * 2 * 3


@pytest.mark.parametrize(("draft_head", "ranks"), [("all", 8), ("group", 2)])
def test_sums_of_a_drafts_filters_join_the_ranks_of_its_head(base: Path, draft_head: str, ranks: int) -> None:
    """Where logits stay on their ranks: a draw's winners, its best logits and twice the sums above the tried ones."""
    plan = make_plan(spec(base, tp=8, draft_tp=2, draft_head=draft_head, kernels="nki", k=2))
    count = {}
    for graph in plan.graphs:
        if graph.tag in (FUSED, FUSED + UNFILTERED):
            found = _collectives(lower_graph(plan, graph))
            assert sum(n for (name, _), n in found.items() if name == "all-gather") == graph.collectives["all-gather"]
            count[graph.tag] = found["all-gather", _in(ranks)]
    # on all ranks the target's embedding, winners and search join them
    of_target = {FUSED: 2 + ALL_GATHERS, FUSED + UNFILTERED: 2} if ranks == 8 else {FUSED: 2, FUSED + UNFILTERED: 2}
    assert count == {FUSED: of_target[FUSED] + 2 * 4, FUSED + UNFILTERED: of_target[FUSED + UNFILTERED] + 2}


def test_the_default_config_is_untouched() -> None:
    assert render(BuildSpec(draft_tp=32)) == render(BuildSpec())


def test_a_bundle_says_where_the_draft_s_head_is_only_where_it_is_not_in_its_group() -> None:
    """So what was built before the head could be on all ranks has the same flags now."""
    assert BuildSpec(draft_tp=8).what_is_built()["draft_head"] == "all"
    for same in ({"draft_tp": 8, "draft_head": "group"}, {}, {"draft_tp": 32}, {"k": 0}):
        assert "draft_head" not in BuildSpec(**same).what_is_built()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_tp": 16}, "draft-tp is 16; the draft's groups have 1, 2, 4, 8 ranks"),
        ({"draft_tp": -1}, "draft-tp is -1"),
        ({"tp": 4, "draft_tp": 8}, "draft-tp 8 does not divide tp 4"),
        ({"draft_head": "none"}, "draft-head is 'none'; it must be one of all, group"),
        ({"kv_shard": "batch"}, "kv-shard is 'batch'; it must be one of heads, sequence"),
        ({"kv_shard": "sequence", "tp": 8}, "the target's 8 kv heads are held once each by 8 ranks"),
        ({"kv_shard": "sequence", "kernels": "nki"}, "kernels nki do not take; use --kernels reference"),
        ({"kv_shard": "sequence", "max_len": 1280}, "1280 cannot be cut into 4 slices .* use 1536"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(changes: dict[str, Any], said: str) -> None:
    for allowed in ({"draft_tp": 8}, {"draft_tp": 32}, {"kernels": "nki"}, {"kv_shard": "sequence", "max_len": 1536}):
        BuildSpec(**allowed).check()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=said):
        BuildSpec(**changes).check()


def test_a_draft_whose_sizes_do_not_divide_is_refused(base: Path) -> None:
    write_model(base / "odd", 3, intermediate_size=20)
    odd = {"draft": str(base / "odd"), "draft_checkpoint": str(base / "odd")}
    spec(base, tp=8, draft_tp=4, **odd).check()
    with pytest.raises(UserError, match="the draft's intermediate_size 20 does not divide by tp 8"):
        spec(base, tp=8, draft_tp=8, **odd).check()


def test_a_head_that_all_ranks_cannot_split_stays_in_its_group() -> None:
    """An EAGLE-3 head has a vocabulary of its own, here 48 ids."""
    heads = Eagle3Config(32, 48, 4, 4, 8, 64, 48, 32, (0, 1), False, 1e6, 1e-6, 512)
    for ranks in (2, 16):
        check_tp(heads, 2, "draft", ranks)
    with pytest.raises(UserError, match=r"draft_vocab_size 48 does not divide by tp 32; .*, or --draft-head group"):
        check_tp(heads, 2, "draft", 32)
