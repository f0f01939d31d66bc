"""Bundles whose layers' weights are packed for the fused kernels: read as they are, and refused elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jaxlib._hlo import HloModule

from compile.graph.trace import lower_graph
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.weights import shard_file
from tests.compile.tiny import relist, spec, write_model
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

# the smallest layers that both fused kernels take
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 128}
REQUESTS = [Request((1, 2, 3), max_new_tokens=5), Request((7,), Params(0.9, 0, 1.0, 0.0, 5), 5)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    base = tmp_path_factory.mktemp("packed")
    write_model(base / "target", 1, num_key_value_heads=1, num_hidden_layers=1, **SIZES)
    write_model(base / "draft", 2, num_key_value_heads=1, num_hidden_layers=1, tie_word_embeddings=True, **SIZES)
    for kernels in ("reference", "nki"):
        untraced(spec(base, kernels, kernels=kernels, k=1))
    return {kernels: read_bundle(base / kernels) for kernels in ("reference", "nki")}


def _tokens(bundle: Bundle) -> list[list[int]]:
    return [r.ids for r in Engine(AsTheyRun(bundle), engine_config(bundle)).run(REQUESTS)]


def test_tokens_are_the_reference_s(bundles: dict[str, Bundle]) -> None:
    assert _tokens(bundles["nki"]) == _tokens(bundles["reference"])


def _operands(proto: bytes, kernel: str) -> list[str]:
    """The opcodes of what the first launch of a kernel is given, in order."""
    text = HloModule.from_serialized_hlo_module_proto(proto).to_string()
    made = dict(re.findall(r"^ *(?:ROOT )?%?(\S+) = .*? ([a-z-]+)\(", text, re.MULTILINE))
    launch = next(
        line for line in text.splitlines() if "custom-call(" in line and f'"{kernel}' in line.replace("\\", "")
    )
    given = re.search(r"custom-call\((.*?)\), custom_call_target", launch)
    assert given is not None
    return [made[re.split(r"[%/ ]", name)[-1]] for name in given[1].split(", ")]


def test_a_step_s_graph_takes_them_as_they_are(bundles: dict[str, Bundle]) -> None:
    """The plan holds packed weights alone, and a launch is given parameters, which nothing has permuted."""
    graph = bundles["nki"].plan.by_key[GraphKey(Stage.STEP, 0, 128)]
    names = {t.name for t in graph.weights}
    assert "target_model.layers.0.mlp.gate_up_packed" in names
    assert not [n for n in names if "_proj" in n]
    proto = lower_graph(bundles["nki"].spec, graph)
    rows, *weights = _operands(proto, "decode_mlp")
    assert weights == ["parameter"] * 3
    assert rows != "parameter"
    assert _operands(proto, "decode_attention")[4:6] == ["parameter"] * 2


def test_weights_of_another_layout_are_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    shutil.copytree(bundles["nki"].path, tmp_path / "mixed")
    shutil.copy(bundles["reference"].path / shard_file(0), tmp_path / "mixed" / shard_file(0))
    relist(tmp_path / "mixed", shard_file(0))
    with pytest.raises(UserError, match=r"tp0_sharded.* was cut for another model, rank or layout"):
        XlaRunner(read_bundle(tmp_path / "mixed"))
