"""Bundles of several ranks and of NKI kernels: the tokens of one rank's reference, and what their graphs exchange.

Ranks are virtual devices, kernels are simulated. A process chooses its number of devices once: a bundle of more ranks
runs in `python -m tests.compile.test_ranks MAX_TOKENS BUNDLE...`, which prints a JSON list of its tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from compile.graph.trace import lower_graph, traced_pair
from compile.recipes import ROOT
from model.approx_filters import STEPS
from model.graph_key import GraphKey, Stage
from tests.compile.tiny import spec, write_model
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle import hlo
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

# 8 kv heads as Qwen3-14B and the drafts: 32 ranks store each four times. 40 query heads, whose groups of five fill the
# places of eight, and a draft of 16, which 32 ranks pad with zero heads
HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 8, "vocab_size": 67}
# the attention kernel's smallest head, and a vocabulary that no number of ranks divides and that is no other size
SHARDED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 319}
# the smallest layers that both fused kernels take, which pack their weights
PACKED = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2,
          "head_dim": 128, "vocab_size": 67}  # fmt: skip
STEP = GraphKey(Stage.STEP, 1, 128)
# greedy, sampled and filtered
REQUESTS = [
    Request((3, 5, 7), Params(), 16),
    Request((9, 2, 40, 41, 6), Params(1.0, 0, 1.0, 0.0, 5), 16),
    Request((11,), Params(0.7, 8, 0.9, 0.0, 2**40), 12),
]


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


def tokens(bundle: Path, max_tokens: int) -> list[list[int]]:
    """The ids of each request, at most so many."""
    opened = read_bundle(bundle)
    requests = [dataclasses.replace(r, max_new_tokens=min(r.max_new_tokens, max_tokens)) for r in REQUESTS]
    return [r.ids for r in Engine(AsTheyRun(opened), engine_config(opened)).run(requests)]


def tokens_of_process(bundles: list[Path], max_tokens: int) -> list[list[list[int]]]:
    """The same of each bundle, in one new process."""
    command = [sys.executable, "-m", __name__, str(max_tokens), *map(str, bundles)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    actual: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return actual


@pytest.mark.slow
def test_tokens_are_those_of_one_rank(base: Path) -> None:
    """Several kv heads a rank, one, and copies of one."""
    one, *several = (_built(base / "heads", tp=tp) for tp in (1, 2, 4, 8, 32))
    expected = tokens(one, 12)
    assert [len(ids) for ids in expected] == [12, 12, 12]
    assert len({tuple(ids) for ids in expected}) == 3
    assert tokens_of_process(several, 12) == [expected] * 4


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["sharded", "packed"])
def test_tokens_of_kernels_are_the_reference_s(base: Path, sizes: str) -> None:
    """Samples from shards of the vocabulary; packed weights; two layers in a launch, which two ranks run as halves."""
    expected = tokens(_built(base / sizes, kernels="reference"), 4)
    assert tokens(_built(base / sizes, kernels="nki", tp=1, layers=2), 4) == expected
    several = [_built(base / sizes, kernels="nki", tp=tp, layers=2) for tp in (2, 4)]
    assert tokens_of_process(several, 4) == [expected] * 2


def _lowered(base: Path, key: GraphKey = STEP, **changes: Any) -> bytes:
    plan = make_plan(spec(base, k=1, batch=3, **changes).bundle)
    return lower_graph(plan.spec, plan.by_key[key])


def _all(proto: bytes) -> list[Any]:
    return [i for computation in hlo.parse(proto).computations for i in computation.instructions]


def _shapes(proto: bytes, collective: str) -> list[list[int]]:
    """The result's shape of every such collective of a graph."""
    return [[*i.shape.dimensions] for i in _all(proto) if i.opcode == collective]


def _collectives(proto: bytes) -> Counter[str]:
    """How often an execution of a graph runs each collective; those of loops are counted once."""
    module = hlo.parse(proto)
    bodies = {c.id: c.instructions for c in module.computations}

    def run(computation: int) -> Counter[str]:
        called = [run(c) for i in bodies[computation] for c in i.called_computation_ids]
        return sum(called, Counter(i.opcode for i in bodies[computation] if i.opcode in ("all-reduce", "all-gather")))

    return run(module.entry_computation_id)


def test_no_logit_crosses_the_ranks(base: Path) -> None:
    """But for hidden rows, a collective has a few numbers of each row and rank; the reference's has the vocabulary."""
    # the vocabulary with its padding
    tp, vocabulary, max_steps = 4, SHARDED["vocab_size"] + 1, len(STEPS)
    of_kernels, of_reference = (_lowered(base / "sharded", tp=tp, kernels=kernels) for kernels in ("nki", "reference"))
    samples = [shape for shape in _shapes(of_kernels, "all-reduce") if shape[-1] != SHARDED["hidden_size"]]
    assert samples
    for shape in samples:
        assert math.prod(shape) <= 3 * 2 * tp * max_steps
        assert math.prod(shape[-2:]) <= tp * max_steps < vocabulary
    assert any(math.prod(shape[-2:]) == vocabulary for shape in _shapes(of_reference, "all-reduce"))
    # two all-reduces a layer of the target and of the draft's pass, one for each embedding, a gather for each sample
    assert _collectives(of_reference) == {"all-reduce": 2 * (2 + 1) + 2 + 2}


def test_a_recipe_s_options_are_those_of_the_trace(base: Path) -> None:
    graph = _lowered(base / "sharded", tp=4, gather="all_gather")
    assert [shape[-1] for shape in _shapes(graph, "all-gather")] == [SHARDED["vocab_size"] + 1] * 2
    assert _collectives(graph) == {"all-reduce": 2 * (2 + 1) + 2, "all-gather": 2}
    options: dict[str, Any] = {"layers": 3, "without": ("accept_drafts",)}
    ctx = traced_pair(spec(base / "sharded", kernels="nki", **options).bundle, False).target_model.ctx
    assert {name: getattr(ctx, name) for name in options} == options


def _operands(proto: bytes, kernel: str) -> list[str]:
    """The opcodes of what the first launch of a kernel is given, in order."""
    opcodes = {i.id: i.opcode for i in _all(proto)}
    call = next(i for i in _all(proto) if i.opcode == "custom-call" and f'"{kernel}'.encode() in i.backend_config)
    return [opcodes[operand] for operand in call.operand_ids]


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


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[2:]]
    jax.config.update("jax_num_cpu_devices", max(read_bundle(path).spec.tp for path in paths))
    print(json.dumps([tokens(path, int(sys.argv[1])) for path in paths]))
