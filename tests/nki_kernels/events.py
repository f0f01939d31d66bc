"""What the launches of a host function issue, without their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nkisim


def events_of(host: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """The events of a call of `host`, which launches kernels by its argument `run`."""
    events: list[Any] = []

    def run(kernel: Any) -> Callable[..., Any]:
        def launch(*operands: Any) -> Any:
            result = nkisim.run(kernel, operands, policy=nkisim.Policy(recording=True, numerics=False))
            events.extend(result.recording.events)
            return result.outputs

        return launch

    host(*arguments, **options, run=run)
    return events
