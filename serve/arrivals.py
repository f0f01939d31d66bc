"""Requests that have come to the engine's process while a step runs, of which vLLM's scheduler does not know yet.

Its input thread unpacks them at once, its loop takes them behind the step. A step that was begun early, before the
loop is asked, would stand between such a request and its first id.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

_UNKNOWN, _CAME = set[str](), threading.Condition()


def watch() -> None:
    """Let vLLM's input thread report each request."""
    # vendor seam: vLLM's modules need the platform while they are imported
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

    unpack = EngineCore.preprocess_add_request

    @functools.wraps(unpack)
    def reported(self: Any, request: Any) -> Any:
        unpacked = unpack(self, request)
        with _CAME:
            _UNKNOWN.add(request.request_id)
            _CAME.notify()
        return unpacked

    EngineCore.preprocess_add_request = reported


def known(name: str) -> None:
    """The scheduler has this request."""
    _UNKNOWN.discard(name)


def waiting() -> bool:
    """Whether a request has come that the scheduler does not know."""
    return bool(_UNKNOWN)


def wait(seconds: float) -> bool:
    """Wait so long, or until such a request comes: whether one has."""
    with _CAME:
        return _CAME.wait_for(waiting, seconds)
