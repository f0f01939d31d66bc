"""The vLLM platform of a bundle: its limits become vLLM's settings, a request that it cannot serve becomes a 400."""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from vllm.platforms.interface import Platform, PlatformEnum, UnspecifiedPlatform

from model.cache import KEY_TILE
from model.dtypes import BY_FLAG
from model.errors import UserError
from model.strict import Range, ValidationError, read
from serve.drain import end_while_starting
from serve.folder import BUNDLE_VARIABLE, DIGEST_VARIABLE, model_folder
from serve.options import check_options, suggest_parsers
from serve.params import UnsupportedParam, check_request, reject_unsupported
from serve.vllm_patches import allow_min_p_and_bias_with_drafts, check_command, report_why_a_request_failed
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.spec import MAX_K
from trnspec.engine.config import engine_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's modules need the platform while they are imported, so the platform imports them when it is called
_SCHEDULER, _WORKER = "serve.scheduler.BundleScheduler", "serve.worker.BundleWorker"
# vLLM's method of speculation that loads no draft model
_SPECULATIVE_METHOD = "custom_class"


@dataclass(frozen=True)
class Options:
    """The options of --additional-config (docs/serving.md)."""

    speculation: bool = True
    k: Annotated[int, Range(0, MAX_K)] | None = None
    acceptance: Literal["none", "summary", "detailed"] = "none"
    platform: Literal["auto", "cpu", "neuron", "pjrt"] = "auto"


def served_bundle() -> Bundle:
    """The bundle that this server was started for, the same in each of its processes; files are checked when read."""
    return same_bundle(_read(os.environ[BUNDLE_VARIABLE]))


def same_bundle(bundle: Bundle) -> Bundle:
    """The bundle, if it is the one that the server's first process has read; else UserError."""
    if bundle.manifest.digest != os.environ.setdefault(DIGEST_VARIABLE, bundle.manifest.digest):
        raise UserError(f"{bundle.path} was replaced while the server was starting; start it again")
    return bundle


# each request needs it, and reading a manifest takes tens of milliseconds
@functools.cache
def _read(path: str) -> Bundle:
    return read_bundle(Path(path))


def options(vllm_config: VllmConfig, bundle: Bundle) -> Options:
    """The checked options of --additional-config; UserError for one that this bundle cannot follow."""
    try:
        chosen = read(Options, vllm_config.additional_config, "additional-config")
    except ValidationError as error:
        raise UserError(str(error)) from error
    if chosen.k not in (None, 0, *bundle.spec.ks):
        raise UserError(f"k is {chosen.k}; this bundle's graphs have k {', '.join(map(str, (0, *bundle.spec.ks)))}")
    return chosen


class NullPlatform(UnspecifiedPlatform):
    """vLLM commands without a bundle; with no device type their command line would end in a traceback."""

    device_type = "cpu"

    @classmethod
    def import_kernels(cls) -> None:
        """Import none: no model runs, and the kernels of vLLM's CPU package need AVX-512."""


class BundlePlatform(Platform):
    """Runs a bundle's graphs in one worker process, which drives the devices of all ranks."""

    _enum = PlatformEnum.OOT
    device_name = "trnspec"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "trnspec"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """Import none: no kernel of vLLM's runs, and those of its CPU package need AVX-512."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        if parser is None:
            return
        bundle = served_bundle()
        folder, rows = str(model_folder(bundle)), {rows for rows, _ in bundle.spec.prompts}
        parser.set_defaults(
            hf_config_path=folder,
            tokenizer=folder,
            generation_config=folder,
            dtype=BY_FLAG[bundle.spec.dtype].name,
            block_size=KEY_TILE,
            max_model_len=bundle.spec.max_len,
            max_num_seqs=bundle.spec.batch,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            # running requests wait for a chunk
            max_num_batched_tokens=max((n for n in rows if n <= 512), default=min(rows)),
            middleware=["serve.drain.DrainMiddleware"],
            shutdown_timeout=60,
        )

        def check(chosen: argparse.Namespace, defaults: argparse.Namespace) -> None:
            check_options(bundle, chosen, defaults)
            # vLLM's "auto" means the model's folder, which is the bundle's
            if chosen.generation_config == "auto":
                chosen.generation_config = folder
            files = (Path(folder) / name for name in ("chat_template.jinja", "tokenizer_config.json"))
            template = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
            if parsers := suggest_parsers(template, chosen):
                print(f"trnspec: to parse what the chat template writes, add {parsers}", file=sys.stderr)

        check_command(parser, check)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, SpeculativeConfig  # noqa: PLC0415

        bundle = served_bundle()
        spec, chosen = bundle.spec, options(vllm_config, bundle)
        # with several API servers, the first process has a handler of vLLM's from the start
        if vllm_config.parallel_config._api_process_count == 1:
            end_while_starting()
        vllm_config.parallel_config.worker_cls = _WORKER
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        if scheduler.scheduler_cls != _SCHEDULER:
            # the budget is for prefill, decode rows of all slots come on top; vLLM calls this twice
            budget = scheduler.max_num_batched_tokens
            longest = scheduler.long_prefill_token_threshold or budget
            scheduler.long_prefill_token_threshold = min(longest, budget, spec.max_len)
            scheduler.max_num_batched_tokens += spec.batch * spec.rows
        scheduler.scheduler_cls = _SCHEDULER
        scheduler.async_scheduling = False
        # block 0 is the null block, in vLLM and in the graphs; vLLM never learns of the spare ones
        cache.block_size = KEY_TILE
        cache.num_gpu_blocks_override = cache.num_gpu_blocks_override or spec.usable
        if spec.k and chosen.speculation and vllm_config.speculative_config is None:
            vllm_config.speculative_config = SpeculativeConfig(
                method=_SPECULATIVE_METHOD,
                model=_WORKER,
                num_speculative_tokens=spec.k,
                target_model_config=vllm_config.model_config,
                target_parallel_config=vllm_config.parallel_config,
            )
        if vllm_config.speculative_config is not None:
            # vLLM's flag for it requires a --speculative-config, which a bundle replaces
            vllm_config.observability_config.per_request_spec_decode_metrics = chosen.acceptance
        allow_min_p_and_bias_with_drafts()
        report_why_a_request_failed()

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

        if not isinstance(params, SamplingParams):
            raise VLLMValidationError("a bundle generates text and serves no other task", parameter="task")
        if not isinstance(processed_inputs, dict) or processed_inputs.get("type") != "token":
            raise VLLMValidationError("a bundle takes text or token ids as a prompt", parameter="prompt")
        default, config = SamplingParams(), engine_config(served_bundle())
        names = SamplingParams.__struct_fields__
        requested, defaults = ({n: getattr(values, n) for n in names} for values in (params, default))
        try:
            reject_unsupported(requested, defaults)
            if params.seed is None and params.temperature > 0:
                # every reader of JSON keeps such a seed exactly
                params.seed = secrets.randbits(53)
            check_request(config, tuple(processed_inputs["prompt_token_ids"]), params)
        except UnsupportedParam as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from error
