"""The platform: a bundle's limits become vLLM's settings; a request that a bundle cannot serve becomes a 400."""

from __future__ import annotations

import functools
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from model.attention import KEY_TILE
from model.errors import UserError
from serve.allowed import Refused, check_request, refuse_others
from serve.drain import end_while_starting
from serve.folder import BUNDLE_VARIABLE, model_folder
from serve.seed import drawn_seed
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.ready import shape_of
from trnspec.engine.text import TOKENIZER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's modules need the platform while they are imported, so the platform imports them when it is called
logger = init_logger("vllm.trnspec")
_SCHEDULER = "serve.scheduler.BundleScheduler"
# ids of prompts that a running request waits for between two steps
_LONGEST_WAIT = 512
# seconds that running requests get to end after SIGTERM
DRAIN_SECONDS = 60
# the options of --additional-config: whether to speculate, a k for every step, how much an answer reports of its own
# drafts (vLLM's words: none, summary, detailed), and the platform that runs the graphs
SPECULATION, FIXED_K, ACCEPTANCE, PLATFORM = "speculation", "k", "acceptance", "platform"
# platform -> the package that runs graphs on it
_PLATFORMS = {"cpu": "jaxlib", "neuron": "libneuronxla", "nrt": "nrtpy"}
# vLLM's method of speculation that loads no draft
_OURS = "custom_class"
# lines of vLLM's start that are not true of a bundle: it counts the block that it keeps for itself as a slot, and warns
# of a setting and of a scheduler that it cannot know
_FALSE_LINES = {
    "vllm.v1.core.kv_cache_utils": "Maximum concurrency",
    "vllm.config.scheduler": "custom scheduler class",
    "vllm.engine.arg_utils": "officially support disabling chunked prefill",
}
for _name in _FALSE_LINES:
    logging.getLogger(_name).addFilter(lambda record: _FALSE_LINES[record.name] not in str(record.msg))


def served_bundle() -> Bundle:
    """The bundle that this server was started for; its files are checked as they are read."""
    return _read(os.environ[BUNDLE_VARIABLE])


# each request needs it, and reading a manifest takes tens of milliseconds
@functools.cache
def _read(path: str) -> Bundle:
    return read_bundle(Path(path))


def speculates(bundle: Bundle, vllm_config: VllmConfig) -> bool:
    """Whether steps may speculate: yes, unless --additional-config or the bundle's k says no."""
    options = vllm_config.additional_config
    if not isinstance(options, dict) or options.keys() - {SPECULATION, FIXED_K, ACCEPTANCE, PLATFORM}:
        raise UserError(
            f'additional-config is {options!r}; a bundle takes {{"speculation": false}}, {{"k": 7}} for every step, '
            '{"acceptance": "summary"} or "detailed", {"platform": "neuron"} or "nrt"'
        )
    if (level := options.get(ACCEPTANCE, "none")) not in ("none", "summary", "detailed"):
        raise UserError(f"acceptance is {level!r}; it must be none, summary or detailed")
    return bundle.spec.k > 0 and bool(options.get(SPECULATION, True))


def graphs_platform(vllm_config: VllmConfig) -> str:
    """The platform that runs the graphs, cpu unless --additional-config says neuron or nrt.

    Raises:
        UserError: no such platform, or this Python has no package for it.
    """
    name = vllm_config.additional_config.get(PLATFORM, "cpu")  # type: ignore[union-attr]
    if name not in _PLATFORMS:
        raise UserError(f"platform is {name!r}; it must be one of {', '.join(_PLATFORMS)}")
    if find_spec(package := _PLATFORMS[name]) is None:
        raise UserError(
            f"platform is {name!r} and this Python has no {package}; install it from AWS's package index on a machine "
            "with Trainium2, or leave platform out"
        )
    return str(name)


def fixed_k(bundle: Bundle, vllm_config: VllmConfig) -> int | None:
    """The k of every step that --additional-config asks for; None leaves it to the server."""
    k, ks = vllm_config.additional_config.get(FIXED_K), (0, *bundle.spec.ks)  # type: ignore[union-attr]
    if k is not None and (type(k) is not int or k not in ks):
        raise UserError(f"k is {k!r}; this bundle's graphs have k {', '.join(map(str, ks))}")
    return k


class BundlePlatform(Platform):
    """A machine that runs a bundle's graphs: one process for all ranks, since one runner drives all devices."""

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
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def import_kernels(cls) -> None:
        """None of vLLM's runs: those of its package for CPUs end the process on a processor without AVX-512."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        if parser is None:
            return
        bundle = served_bundle()
        folder = str(model_folder(bundle))
        parser.set_defaults(
            hf_config_path=folder,
            tokenizer=folder,
            generation_config=folder,
            max_model_len=bundle.spec.max_len,
            max_num_seqs=bundle.spec.batch,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_num_batched_tokens=_chunk(bundle.spec),
            middleware=["serve.drain.DrainMiddleware", "serve.seed.SeedMiddleware"],
            shutdown_timeout=DRAIN_SECONDS,
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.config import CompilationMode, SpeculativeConfig  # noqa: PLC0415

        bundle = served_bundle()
        spec = bundle.spec
        # with several API servers, the first process has a handler of vLLM's from the start
        if vllm_config.parallel_config._api_process_count == 1:
            end_while_starting()
        _refuse_options(bundle, vllm_config)
        graphs_platform(vllm_config)
        fixed_k(bundle, vllm_config)
        vllm_config.parallel_config.worker_cls = "serve.worker.BundleWorker"
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        if not scheduler.enable_chunked_prefill:
            # every slot may hold a whole context: the token budget never shortens a step
            scheduler.max_num_batched_tokens = spec.batch * (spec.max_len + 2 * spec.k + 2)
        elif scheduler.scheduler_cls != _SCHEDULER:
            # the budget is for prompts: steps of all slots come on top. vLLM calls this twice
            longest = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
            scheduler.long_prefill_token_threshold = min(longest, spec.max_len)
            scheduler.max_num_batched_tokens += spec.batch * spec.rows
        scheduler.scheduler_cls = _SCHEDULER
        scheduler.async_scheduling = False
        # vLLM keeps block 0 for itself, as the pools do
        cache.block_size = KEY_TILE
        cache.num_gpu_blocks_override = cache.num_gpu_blocks_override or spec.pool
        if speculates(bundle, vllm_config) and vllm_config.speculative_config is None:
            vllm_config.speculative_config = SpeculativeConfig(
                method=_OURS,
                model="serve.worker.BundleWorker",
                num_speculative_tokens=spec.k,
                target_model_config=vllm_config.model_config,
                target_parallel_config=vllm_config.parallel_config,
            )
        if vllm_config.speculative_config is not None:
            # vLLM's own flag for it requires a --speculative-config, which a bundle replaces
            level = vllm_config.additional_config.get(ACCEPTANCE, "none")  # type: ignore[union-attr]
            vllm_config.observability_config.per_request_spec_decode_metrics = level
        # the check is for vLLM's own drafts, which cannot follow min-p and logit_bias; ours can
        SamplingParams._validate_spec_decode = lambda self, speculative_config: None

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

        if not isinstance(params, SamplingParams):
            raise VLLMValidationError("a bundle generates text and serves no other task", parameter="task")
        if not isinstance(processed_inputs, dict) or processed_inputs.get("type") != "token":
            raise VLLMValidationError("a bundle takes text or token ids as a prompt", parameter="prompt")
        default, shape = SamplingParams(), shape_of(served_bundle())
        names = SamplingParams.__struct_fields__
        requested, defaults = ({n: getattr(values, n) for n in names} for values in (params, default))
        try:
            refuse_others(requested, defaults)
            if params.seed is None and params.temperature > 0:
                # only completions and chat draw it before, and have a header for it
                params.seed = drawn_seed()
            check_request(shape, tuple(processed_inputs["prompt_token_ids"]), params)
        except Refused as refused:
            raise VLLMValidationError(str(refused), parameter=refused.parameter) from refused


def _refuse_blocks(spec: BundleSpec, blocks: int | None) -> None:
    """UserError for a number of blocks that the bundle does not have."""
    least = 1 + spec.max_len // KEY_TILE
    if blocks is not None and not least <= blocks <= spec.pool:
        raise UserError(f"num-gpu-blocks-override is {blocks}; this bundle takes {least} to {spec.pool}")


def _chunk(spec: BundleSpec) -> int:
    """Ids of prompts in a step, unless the command says otherwise: a chunk that running requests wait for."""
    return max(rows for rows, _ in spec.prompts if rows <= _LONGEST_WAIT)


def _refuse_options(bundle: Bundle, vllm_config: VllmConfig) -> None:
    """UserError for an option of the command line that the bundle cannot follow."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    scheduler, spec = vllm_config.scheduler_config, bundle.spec
    speculative = vllm_config.speculative_config
    # vLLM calls this again in its engine's process, with the settings of the first
    if speculative is not None and speculative.method != _OURS:
        raise UserError("speculative-config was given; the bundle brings its draft and its k, leave it out")
    if parallel.data_parallel_size != 1:
        raise UserError(
            f"data-parallel-size is {parallel.data_parallel_size}; a server runs one copy of the bundle, start one for "
            "each copy and a router in front of them"
        )
    if parallel.world_size != 1:
        raise UserError("a parallel size was given; one process runs all ranks of the bundle, leave it out")
    if model.max_model_len != spec.max_len:
        raise UserError(f"max-model-len is {model.max_model_len}; the bundle's is {spec.max_len}, leave it out")
    if scheduler.max_num_seqs > spec.batch:
        raise UserError(f"max-num-seqs is {scheduler.max_num_seqs}; the bundle has {spec.batch} slots, ask for no more")
    _refuse_blocks(spec, vllm_config.cache_config.num_gpu_blocks_override)
    if not bundle.manifest.has_weights:
        raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders that hold them")
    if not model.skip_tokenizer_init and TOKENIZER not in bundle.files:
        raise UserError(f"{bundle.path} has no tokenizer; build it from a target folder that holds tokenizer.json")
