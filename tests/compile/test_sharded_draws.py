"""The graphs of `--kernels nki` draw from vocabulary shards: the tokens of one rank, and no logit on its way.

Kernels are simulated, ranks are virtual devices. Requests are greedy, drawn and filtered, side by side in a batch.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
from jaxlib import xla_client

from compile.graph.trace import lower_graph
from model.graph_key import GraphKey, Stage
from model.rough_filters import STEPS
from model.weights import shard_file
from tests.compile.run_requests import tokens, tokens_of_process
from tests.compile.test_toolchain import Ranks, SlotSeeds
from tests.compile.tiny import relist, spec, write_model
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

# the attention kernel's smallest head, and a vocabulary that is no other size
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 320}
COUNT = 4
# sums of a row and rank in one pass of a filter's search: the most that a draw exchanges
MOST_NUMBERS = len(STEPS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft that has its first layer, so that some drafts are accepted."""
    folder = tmp_path_factory.mktemp("shards")
    write_model(folder / "target", 1, 0.2, **SIZES)
    write_model(folder / "draft", 1, 0.2, num_hidden_layers=1, **SIZES)
    return folder


def built(base: Path, kernels: str, tp: int, **split: object) -> Path:
    out = f"{kernels}{tp}" + "".join(f"-{value}" for value in split.values())
    if (base / out).exists():
        return base / out
    return untraced(spec(base, out, kernels=kernels, tp=tp, k=1, batch=3, **split))


@pytest.fixture(scope="module")
def expected(base: Path) -> list[list[int]]:
    """The reference's tokens on one rank."""
    ids = tokens(built(base, "reference", 1), COUNT)
    assert len({tuple(i) for i in ids}) == 3
    return ids


# one rank: tests/model/test_simulated_kernels.py; two, with the draft on both: tests/model/test_asks.py
def test_tokens_are_the_reference_s_on_one_rank(base: Path, expected: list[list[int]]) -> None:
    """Four ranks hold a shard of every head each; the draft's layers are in groups of two."""
    assert tokens_of_process([built(base, "nki", 4, draft_tp=2)], COUNT) == [expected]


def test_a_wrong_first_id_gives_other_tokens(base: Path, expected: list[list[int]]) -> None:
    """Every rank is told that it is the first, so that no token is of the upper half."""
    wrong = shutil.copytree(built(base, "nki", 2), base / "wrong")
    for rank in range(2):
        file = wrong / shard_file(rank)
        content = bytearray(file.read_bytes())
        size = int.from_bytes(content[:8], "little") + 8
        # the numbers of both models come first
        assert content[size : size + 8] == 2 * rank.to_bytes(4, "little")
        content[size : size + 8] = bytes(8)
        file.write_bytes(content)
    relist(wrong, shard_file(0), shard_file(1))
    half = SIZES["vocab_size"] // 2
    assert any(ids[0] >= half for ids in expected)
    assert all(ids[0] < half for ids in tokens(wrong, 1))


def gathered(base: Path, kernels: str, tp: int) -> list[list[int]]:
    """The result's shape of every all-gather of the fused graph."""
    plan = make_plan(spec(base, kernels=kernels, tp=tp, k=3, batch=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    text = xla_client.XlaComputation(lower_graph(plan.spec, graph)).as_hlo_text()
    found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    assert len(found) == text.count(" all-gather(")
    return [[int(n) for n in shape.split(",")] for shape in found]


def test_no_logit_crosses_the_ranks(base: Path) -> None:
    """Beside the embedding's, a gather has a few numbers of each row and rank; the reference's has the vocabulary."""
    tp = 4
    draws = [s for s in gathered(base, "nki", tp) if s[-1] != SIZES["hidden_size"]]
    assert draws
    for shape in draws:
        assert math.prod(shape) <= 2 * 4 * tp * MOST_NUMBERS
        assert shape[-1] <= tp * MOST_NUMBERS < SIZES["vocab_size"]
    assert any(s[-1] == SIZES["vocab_size"] for s in gathered(base, "reference", tp))


def test_the_module_for_nxdi_draws_from_shards(base: Path) -> None:
    """What model.pt is traced from, on two eager ranks, against the reference's graphs on one."""
    one, two = (read_bundle(built(base, kernels, tp)) for kernels, tp in (("reference", 1), ("nki", 2)))
    requests = [
        Request((3, 5, 7), max_new_tokens=3),
        Request((9, 2), Params(1.2, top_k=9, top_p=0.8), max_new_tokens=3),
        Request((11,), Params(0.9), max_new_tokens=3),
    ]
    runners = (SlotSeeds(AsTheyRun(one)), Ranks(two.path, 2, base, kernels="nki", k=1, batch=3))
    ids = [
        [r.ids for r in Engine(runner, engine_config(bundle)).run(requests)]  # type: ignore[arg-type]
        for runner, bundle in zip(runners, (one, two), strict=True)
    ]
    assert ids[0] == ids[1]
