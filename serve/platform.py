"""The platform: a bundle's limits become vLLM's settings, and what a bundle cannot serve becomes a 400."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from model.bundle.manifest import Bundle, read_bundle
from serve.folder import BUNDLE_VARIABLE, model_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's modules ask for the platform while they are imported: what it needs of them is imported when it is called
logger = init_logger("vllm.trnspec")
# seconds that running requests get to end after SIGTERM
DRAIN_SECONDS = 60


def served_bundle() -> Bundle:
    """The bundle that this server was started for."""
    return read_bundle(Path(os.environ[BUNDLE_VARIABLE]))


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
    def pre_register_and_update(cls, parser: Any = None) -> None:
        if parser is None:
            return
        from vllm import SamplingParams  # noqa: PLC0415

        # vLLM refuses min-p beside any speculation, for its own sampler's sake; our graphs filter by it
        SamplingParams._validate_spec_decode = lambda self, speculative_config: None
        bundle = served_bundle()
        folder = str(model_folder(bundle))
        parser.set_defaults(
            hf_config_path=folder,
            tokenizer=folder,
            generation_config="vllm",
            max_model_len=bundle["max_len"],
            shutdown_timeout=DRAIN_SECONDS,
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, SpeculativeConfig  # noqa: PLC0415

        bundle = served_bundle()
        vllm_config.parallel_config.worker_cls = "serve.worker.BundleWorker"
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        scheduler.max_num_seqs = bundle["batch"]
        # every slot may hold a whole context: no step is cut short for want of a budget
        scheduler.max_num_batched_tokens = bundle["batch"] * (bundle["max_len"] + 2 * bundle["k"] + 2)
        scheduler.enable_chunked_prefill = False
        scheduler.async_scheduling = False
        cache.enable_prefix_caching = False
        # a block is a slot; vLLM keeps block 0 for itself
        cache.block_size = bundle["max_len"]
        cache.num_gpu_blocks_override = bundle["batch"] + 1
        if bundle["k"] and vllm_config.speculative_config is None:
            vllm_config.speculative_config = SpeculativeConfig(
                method="custom_class",
                model="serve.worker.BundleWorker",
                num_speculative_tokens=bundle["k"],
                target_model_config=vllm_config.model_config,
                target_parallel_config=vllm_config.parallel_config,
            )

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

        from serve.allowed import draw_seed, refusal  # noqa: PLC0415

        if not isinstance(params, SamplingParams):
            raise VLLMValidationError("a bundle generates text and serves no other task", parameter="task")
        if not isinstance(processed_inputs, dict) or processed_inputs.get("type") != "token":
            raise VLLMValidationError("a bundle takes text or token ids as a prompt", parameter="prompt")
        if refused := refusal(params):
            raise VLLMValidationError(refused[1], parameter=refused[0])
        if (seed := draw_seed(params)) is not None:
            logger.info("a request without a seed drew %d", seed)
