"""Every global change that this package makes to vLLM, torch or the process: one list, each with its reason."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch


def allow_min_p_and_bias_with_drafts() -> None:
    """Skip vLLM's check that rejects min-p and logit bias with its own drafters; a bundle's graphs serve both."""
    from vllm import SamplingParams  # noqa: PLC0415  (vLLM's modules need the platform while they are imported)

    SamplingParams._validate_spec_decode = lambda self, speculative_config: None


def check_command(parser: Any, check: Callable[[Any, Any], None]) -> None:
    """Call `check(chosen, defaults)` with the options that this parser reads: vLLM's configuration hides defaults."""
    parse = parser.parse_known_args

    def parse_known_args(arguments: Any = None, namespace: Any = None) -> Any:
        chosen, rest = parse(arguments, namespace)
        check(chosen, parse([])[0])
        return chosen, rest

    parser.parse_known_args = parse_known_args


@functools.cache
def report_why_a_request_failed() -> None:
    """A client gets the sentence of our scheduler, its `stop_reason`, for vLLM's "Internal server error"."""
    from vllm.exceptions import GenerationError, GracefulHTTPError  # noqa: PLC0415
    from vllm.v1.engine import FinishReason  # noqa: PLC0415
    from vllm.v1.engine.output_processor import RequestState  # noqa: PLC0415

    class RequestFailed(GracefulHTTPError, GenerationError):
        """AsyncLLM passes the one on, and a stream answers the other without a traceback in the log."""

    make = RequestState.make_request_output

    @functools.wraps(make)
    def make_request_output(self: Any, ids: Any, pooled: Any, finish: Any, reason: Any, *rest: Any, **more: Any) -> Any:
        if finish == FinishReason.ERROR and isinstance(reason, str):
            return RequestFailed(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
        return make(self, ids, pooled, finish, reason, *rest, **more)

    RequestState.make_request_output = make_request_output


def skip_accelerator_caches() -> None:
    """vLLM empties the caches of torch's accelerator when a worker ends; a bundle has none, and torch would raise."""
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


def before_engine_shutdown(engine_client: Any, wait: Callable[[float], float]) -> None:
    """Call `wait(seconds)` before this client's engine ends; it returns the seconds left for the shutdown itself."""
    shutdown = engine_client.shutdown

    def after_requests(timeout: float | None = None) -> None:
        left = wait(timeout or 0.0)
        # vLLM's client may log a traceback for the end of the engine that this call brings about
        lines = logging.getLogger("vllm.v1.engine.async_llm")
        lines.addFilter(lambda record: "output_handler failed" not in str(record.msg))
        shutdown(timeout=left)

    engine_client.shutdown = after_requests
