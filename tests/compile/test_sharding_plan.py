"""Draft groups before anything runs: bytes, collectives and their groups, refusals."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jaxlib import xla_client

from compile.build import main
from compile.graph.trace import lower_graph
from compile.neuron.config import render
from compile.spec import BuildSpec, Recipe
from model.drafters.eagle3 import Eagle3Config
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.nki.filter_floor import ALL_GATHERS
from model.parallel import check_tp
from tests.compile.tiny import spec, write_model
from trnspec.bundle.plan import make_plan, whole_prompts

BASIC = ["--tp", "32", "--k", "7", "--dry-run", "--json"]


@pytest.fixture
def planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The plan that the command prints with these fields of a recipe."""

    def planned(**recipe: object) -> Any:
        (tmp_path / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        main([*BASIC, "--recipe", str(tmp_path / "recipe.json")])
        return json.loads(capsys.readouterr().out)

    return planned


def test_full_pair_with_the_draft_on_four_ranks(planned_with: Callable[..., Any]) -> None:
    planned = planned_with(draft_tp=4)
    # 32B on 32 ranks: 2 of 64 query heads, one of 8 kv heads, 800 of 25600, 160 of 5120 embedded, 4748 logits
    layer = 2 * 5120 * 256 + 2 * 5120 * 128 + 3 * 5120 * 800 + 2 * 5120 + 2 * 128
    target = 64 * layer + 151936 * 160 + 4748 * 5120 + 5120
    # 1.7B on 4 ranks: 4 of 16 query heads, 2 of 8 kv heads, 1536 of 6144, 512 of 2048 embedded; logits on all ranks
    layer = 2 * 2048 * 512 + 2 * 2048 * 256 + 3 * 2048 * 1536 + 2 * 2048 + 2 * 128
    draft = 28 * layer + 151936 * 512 + 4748 * 2048 + 2048
    assert planned["bytes_per_rank"]["weights"] == 2 * (target + draft) + 2 * 4
    # keys and values, bf16, 33 blocks of 128 for 4 sequences of 1024, D 128: one kv head of the target, two of the
    # draft, and ids
    assert planned["bytes_per_rank"]["caches"] == 2 * 2 * 33 * 128 * 128 * (64 + 2 * 28) + 4 * 4
    assert _fused(planned) == {"all-reduce": 2 * (64 + 7 * 28), "all-gather": 1 + 1 + 7 + 7}


def _fused(planned: Any) -> dict[str, int]:
    (graph,) = (
        g for g in planned["graphs"] if g["k"] and (g["stage"], g["bucket"], g["filters"]) == ("step", 128, True)
    )
    counts: dict[str, int] = graph["collectives"]
    return counts


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


@pytest.mark.parametrize("draft_tp", [4, 2, 1])
def test_each_collective_joins_the_promised_ranks(base: Path, draft_tp: int) -> None:
    """k 3, a target of two layers on 8 ranks, a draft of one layer, its head on all ranks."""
    plan = make_plan(spec(base, tp=8, draft_tp=draft_tp).bundle)
    # passes of the target, of the draft's layers, and of its head
    passes_of = {
        (Stage.PREFILL, 3): (1, 0, 0), (Stage.PREFILL_DRAFT, 3): (0, 1, 0),
        (Stage.STEP, 3): (1, 3, 3), (Stage.STEP, 0): (1, 0, 0),
    }  # fmt: skip
    # the plan's contract follows the loops of asking graphs, this count does not; no filter joins ranks here
    cases = [(g, passes_of[g.key[:2]]) for g in plan.graphs if g.key.filters and not g.key.asking]
    # NxDI's prompt is both models'
    for graph, (targets, passes, heads) in [*cases, (whole_prompts(plan)[-1], (1, 1, 0))]:
        of_target = {("all-reduce", _in(8)): 4, ("all-gather", _in(8)): 2}
        expected = Counter(of_target if targets else {})
        if draft_tp > 1:
            expected += Counter({("all-reduce", _in(draft_tp)): 2 * passes})
            expected += Counter({("all-gather", _in(draft_tp)): passes})
        expected += Counter({("all-gather", _in(8)): heads})
        found = _collectives(lower_graph(plan.spec, graph))
        assert found == expected
        for op, times in graph.collectives.items():
            assert sum(n for (name, _), n in found.items() if name == op) == times


def test_a_draft_of_the_targets_configuration_has_its_own_groups(base: Path) -> None:
    """Layers and models of one kind share a trace: not between models whose collectives join other ranks."""
    target = str(base / "target")
    plan = make_plan(spec(base, tp=8, draft=target, draft_tp=2).bundle)
    found = _collectives(lower_graph(plan.spec, plan.by_key[GraphKey(Stage.STEP, 3, 128)]))
    assert found["all-reduce", _in(8)] == 2 * 2
    assert found["all-reduce", _in(2)] == 2 * 2 * 3


def test_sums_of_filters_join_the_ranks_of_the_head(base: Path) -> None:
    """Where logits stay on their ranks a draw gathers its winners; a filter's search gathers more, by the plan."""
    plan, count = make_plan(spec(base, tp=8, draft_tp=2, kernels="nki", k=2).bundle), {}
    for filters in (True, False):
        graph = plan.by_key[GraphKey(Stage.STEP, 2, 128, filters)]
        found = _collectives(lower_graph(plan.spec, graph))
        assert sum(n for (name, _), n in found.items() if name == "all-gather") == graph.collectives["all-gather"]
        count[filters] = found["all-gather", _in(8)]
    # on all ranks: the target's embedding, its winners and those of two drafts
    assert count[False] == 4
    assert count[True] >= count[False] + ALL_GATHERS


def test_the_default_config_is_untouched() -> None:
    assert render(BuildSpec(recipe=Recipe(draft_tp=32)).bundle) == render(BuildSpec().bundle)


@pytest.mark.parametrize(
    ("sizes", "recipe", "said"),
    [
        ({}, {"draft_tp": 16}, "draft_tp is 16; the draft's groups have 1, 2, 4, 8 ranks"),
        ({}, {"draft_tp": -1}, "draft_tp is -1"),
        ({"tp": 4}, {"draft_tp": 8}, "draft_tp 8 does not divide tp 4"),
        ({"k": "0"}, {"draft_tp": 4}, "draft_tp was given and the drafter none has no model"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(sizes: dict[str, Any], recipe: dict[str, Any], said: str) -> None:
    for ranks in (8, 32):
        BuildSpec(recipe=Recipe(draft_tp=ranks)).check()
    with pytest.raises(UserError, match=said):
        BuildSpec(**sizes, recipe=Recipe(**recipe)).check()


def test_a_draft_whose_sizes_do_not_divide_is_refused(base: Path) -> None:
    odd = str(write_model(base / "odd", 3, intermediate_size=20))
    spec(base, tp=8, draft_tp=4, draft=odd).check()
    with pytest.raises(UserError, match="the draft's intermediate_size 20 does not divide by tp 8"):
        spec(base, tp=8, draft_tp=8, draft=odd).check()


def test_a_head_that_all_ranks_cannot_split_is_refused() -> None:
    """An EAGLE-3 head has a vocabulary of its own, here 48 ids."""
    heads = Eagle3Config(32, 48, 4, 4, 8, 64, 48, 32, (0, 1), False, 1e6, 1e-6, 512)
    check_tp(heads, 2, "draft", 16)
    with pytest.raises(UserError, match="draft_vocab_size 48 does not divide by tp 32"):
        check_tp(heads, 2, "draft", 32)
