"""Bundles of several ranks and of NKI kernels: the tokens of one rank's reference, and what their graphs exchange.

Ranks are virtual devices, kernels are simulated. Requests of a batch are greedy, sampled and filtered.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jaxlib import xla_client
from jaxlib._hlo import HloModule

from compile.graph.trace import lower_graph
from model.approx_filters import STEPS
from model.graph_key import GraphKey, Stage
from tests.compile.run_requests import tokens, tokens_of_process
from tests.compile.tiny import spec, write_model
from tests.model.family import untraced
from trnspec.bundle import hlo
from trnspec.bundle.plan import make_plan

# 8 kv heads as Qwen3-14B and the drafts: 32 ranks store each four times. 40 query heads, whose groups of five fill the
# places of eight, and a draft of 16, which 32 ranks pad with zero heads
HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 8}
# the attention kernel's smallest head, and a vocabulary that is no other size
SHARDED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 320}
# the smallest layers that both fused kernels take, which pack their weights
PACKED = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2,
          "head_dim": 128}  # fmt: skip
STEP = GraphKey(Stage.STEP, 1, 128)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "heads/target", 1, 0.2, **HEADS, num_attention_heads=40)
    write_model(folder / "heads/draft", 2, 0.2, **HEADS, num_attention_heads=16, num_hidden_layers=1)
    # a draft that has the target's first layer, so that some drafts are accepted
    for name, sizes in (("sharded", SHARDED), ("packed", PACKED)):
        write_model(folder / name / "target", 1, 0.2, **sizes, num_hidden_layers=2)
        write_model(folder / name / "draft", 1, 0.2, **sizes, num_hidden_layers=1)
    return folder


def _built(base: Path, **changes: Any) -> Path:
    return untraced(spec(base, "-".join(map(str, changes.values())), k=1, batch=3, **changes))


@pytest.mark.slow
def test_tokens_are_those_of_one_rank(base: Path) -> None:
    """Several kv heads a rank, one, and copies of one."""
    one, *several = (_built(base / "heads", tp=tp) for tp in (1, 2, 8, 32))
    expected = tokens(one, 12)
    assert [len(ids) for ids in expected] == [12, 12, 12]
    assert len({tuple(ids) for ids in expected}) == 3
    assert tokens_of_process(several, 12) == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["sharded", "packed"])
def test_tokens_of_kernels_are_the_reference_s(base: Path, sizes: str) -> None:
    """Samples from shards of the vocabulary; packed weights; two layers in a launch, which two ranks run as halves."""
    expected = tokens(_built(base / sizes, kernels="reference"), 4)
    assert tokens(_built(base / sizes, kernels="nki", tp=1, layers=2), 4) == expected
    assert tokens_of_process([_built(base / sizes, kernels="nki", tp=2, layers=2)], 4) == [expected]


def _lowered(base: Path, key: GraphKey = STEP, **changes: Any) -> bytes:
    plan = make_plan(spec(base, k=1, batch=3, **changes).bundle)
    return lower_graph(plan.spec, plan.by_key[key])


def _gathered(proto: bytes) -> list[list[int]]:
    """The result's shape of every all-gather of a graph."""
    text = xla_client.XlaComputation(proto).as_hlo_text()
    found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    assert len(found) == text.count(" all-gather(")
    return [[int(n) for n in shape.split(",")] for shape in found]


def _collectives(proto: bytes) -> Counter[str]:
    """How often an execution of a graph runs each collective; those of loops are counted once."""
    module = hlo.parse(proto)
    bodies = {c.id: c.instructions for c in module.computations}

    def run(computation: int) -> Counter[str]:
        called = [run(c) for i in bodies[computation] for c in i.called_computation_ids]
        return sum(called, Counter(i.opcode for i in bodies[computation] if i.opcode in ("all-reduce", "all-gather")))

    return run(module.entry_computation_id)


def test_no_logit_crosses_the_ranks(base: Path) -> None:
    """But for the embedding's, a gather has a few numbers of each row and rank; the reference's has the vocabulary."""
    tp, vocabulary, most = 4, SHARDED["vocab_size"], len(STEPS)
    of_kernels, of_reference = (_lowered(base / "sharded", tp=tp, kernels=kernels) for kernels in ("nki", "reference"))
    draws = [shape for shape in _gathered(of_kernels) if shape[-1] != SHARDED["hidden_size"]]
    assert draws
    for shape in draws:
        assert math.prod(shape) <= 3 * 2 * tp * most
        assert shape[-1] <= tp * most < vocabulary
    assert any(shape[-1] == vocabulary for shape in _gathered(of_reference))
    # two all-reduces a layer of the target and of the draft's pass; a gather for each embedding and each sample
    assert _collectives(of_reference) == {"all-reduce": 2 * (2 + 1), "all-gather": 2 + 2}


def _operands(proto: bytes, kernel: str) -> list[str]:
    """The opcodes of what the first launch of a kernel is given, in order."""
    text = HloModule.from_serialized_hlo_module_proto(proto).to_string()
    made = dict(re.findall(r"^ *(?:ROOT )?%?(\S+) = .*? ([a-z-]+)\(", text, re.MULTILINE))
    calls = (line for line in text.splitlines() if "custom-call(" in line and f'"{kernel}' in line.replace("\\", ""))
    given = re.search(r"custom-call\((.*?)\), custom_call_target", next(calls))
    assert given is not None
    return [made[re.split(r"[%/ ]", name)[-1]] for name in given[1].split(", ")]


def test_packed_weights_are_given_as_they_are(base: Path) -> None:
    """A launch is given parameters, which nothing has permuted."""
    proto = _lowered(base / "packed", GraphKey(Stage.STEP, 0, 128), kernels="nki", layers=1)
    names = {name for i in hlo.entry(hlo.parse(proto)).instructions for name in hlo.io_names(i)}
    assert "target_model.layers.0.mlp.gate_up_packed" in names
    assert not [name for name in names if "_proj" in name]
    rows, *weights = _operands(proto, "decode_mlp")
    assert weights == ["parameter"] * 3
    assert rows != "parameter"
    assert _operands(proto, "decode_attention")[4:6] == ["parameter"] * 2
