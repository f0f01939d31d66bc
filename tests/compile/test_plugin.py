"""The V1 plugin's side of a bundle: what it reads of one, and our bundle behind its own source where that is at hand.

`TRNSPEC_NXDI_SOURCE` and `TRNSPEC_VLLM_NEURON_SOURCE` name checkouts of aws-neuron/neuronx-distributed-inference and of
vllm-project/vllm-neuron (0.2); without them the second half is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile.neuron import config
from compile.neuron.flags import nxdi_tag
from compile.recipes import ROOT
from compile.serve_command import Served, arguments_of_v1, engine_arguments, engine_environment
from model.weights import shard_file
from tests.compile.tiny import spec, write_noisy_pair
from trnspec.bundle.plan import make_plan

SOURCES = ("TRNSPEC_NXDI_SOURCE", "TRNSPEC_VLLM_NEURON_SOURCE")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_noisy_pair(tmp_path)


def test_the_config_says_what_the_plugin_and_its_nxdi_decide_by(base: Path) -> None:
    """The loaded artifacts alone decide these: continuous batching, ids from the device, one cache line a sequence."""
    written = json.loads(config.render(spec(base).bundle))
    neuron = written["neuron_config"]
    decided: dict[str, Any] = {
        "enable_fused_speculation": True, "enable_eagle_speculation": False, "is_block_kv_layout": False,
        "is_prefix_caching": False, "chunked_prefill_config": None, "async_mode": False, "is_continuous_batching": True,
        "ctx_batch_size": 1, "padding_side": "right", "save_sharded_checkpoint": True, "lora_config": None,
        "output_logits": False, "start_rank_id": 0, "local_ranks_size": 1, "speculation_length": 4,
    }  # fmt: skip
    assert {name: neuron[name] for name in decided} == decided
    assert neuron["on_device_sampling_config"]["dynamic"]
    assert neuron["on_device_sampling_config"]["global_topk"] == 256
    assert written["fused_spec_config"]["worker_cls"]["__name__"] == "NeuronQwen3Model"


def test_results_lie_where_the_plugin_takes_them(base: Path) -> None:
    """It takes the first result as the accepted ids and the last one before the caches as the next position."""
    plan = make_plan(spec(base).bundle)
    for graph in plan.graphs:
        if nxdi_tag(graph.key, plan.spec) and (graph.key.is_prefill or graph.key.k):
            batch = 1 if graph.key.is_prefill else 2
            assert [t.name for t in graph.outputs][:1] + [t.name for t in graph.outputs][3:4] == [
                "accepted_tokens",
                "next_pos_ids",
            ]
            assert (graph.outputs[0].shape, graph.outputs[3].shape) == ((batch, 4), (batch, 1))


def test_arguments_and_files_have_the_names_that_it_reads() -> None:
    asked = arguments_of_v1(engine_arguments(Served("t", "d", 2, 4, 128, 3)))
    assert asked["additional_config"] == {
        "override_neuron_config": {"save_sharded_checkpoint": True, "enable_fused_speculation": True}
    }
    assert "override_neuron_config" not in asked
    assert asked["speculative_config"]["num_speculative_tokens"] == 4
    assert engine_environment("/bundle", 2, v1=True)["NEURON_COMPILED_ARTIFACTS"] == "/bundle"
    assert shard_file(3) == "weights/tp3_sharded_checkpoint.safetensors"


@pytest.mark.skipif(
    any(name not in os.environ for name in SOURCES), reason=f"{' and '.join(SOURCES)} name no checkouts of the sources"
)
def test_the_plugin_s_own_loader_and_runner_serve_a_pair(base: Path) -> None:
    folders = [str(Path(os.environ[name]).absolute()) for name in SOURCES]
    program = [sys.executable, "-m", "tests.compile.vendor.run_plugin", str(base), *folders]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(facts))
    assert facts["greedy"] == facts["alone"]
    assert facts["application"] == facts["alone"][1][: len(facts["application"])]
    assert len(facts["application"]) > 2, "a step that accepts a draft"
    assert facts["steps"] < sum(map(len, facts["alone"])), "steps emit several tokens"
    # what docs/device.md warns of: it holds as long as the plugin does this
    assert facts["prompts_drawn_with"] == [[1.0, 1.0, 1.0]] * 2, "the second asked for a temperature of 0.7"
    assert facts["no_filter_is_asked_as"][:2] == [256.0, 1.0]
    assert facts["end"].startswith("Sampled token IDs exceed the max model length")
