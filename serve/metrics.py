"""Prometheus metrics in addition to vLLM's, which count drafts and accepted tokens: steps by k, gaps between steps."""

from __future__ import annotations

import collections
import time

from prometheus_client import Counter, Gauge, Histogram

from trnspec.engine.engine import Event

_GAPS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# an Info is not shown where several processes share their metrics
_DRAFTER = Gauge(
    "trnspec_drafter_info", "The bundle's drafter; none without speculation", ["kind"], multiprocess_mode="mostrecent"
)
_STEPS = Counter("trnspec_steps", "Decode steps of the target by the k of their graph", ["k"])
_CHUNKS = Counter("trnspec_prefill_chunks", "Prefill chunks")
_GAP = Histogram("trnspec_host_gap_seconds", "Seconds between two decode steps, 0 if launched ahead", buckets=_GAPS_S)


class Metrics:
    """Counts of this worker."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        _DRAFTER.labels(drafter).set(1)
        self._steps, self._tokens, self._ended = collections.Counter[int](), collections.Counter[str](), 0.0

    def begin(self) -> None:
        """A step begins; its requests waited since the last one ended."""
        if self._ended:
            _GAP.observe(time.perf_counter() - self._ended)

    def end(self, prefill: bool, events: list[Event], launched_ahead: bool) -> None:
        """A prefill chunk or a decode step has ended; without a gap if the next step was launched before its end."""
        self._ended = time.perf_counter()
        if launched_ahead:
            _GAP.observe(0.0)
        if prefill:
            _CHUNKS.inc()
            return
        k = events[0].k if events else 0
        self._steps[k] += 1
        _STEPS.labels(str(k)).inc()
        for event in events:
            self._tokens.update(emitted=len(event.ids), steps=1, drafted=event.drafted)

    def summary(self) -> str:
        """One line for the log."""
        n = self._tokens
        return (
            f"steps by k {dict(sorted(self._steps.items()))}, {n['emitted'] / max(1, n['steps']):.2f} tokens a step "
            f"and request, {n['emitted'] - n['steps']} of {n['drafted']} draft tokens emitted (drafter {self.drafter})"
        )
