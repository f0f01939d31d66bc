"""Prometheus metrics in addition to vLLM's, which count drafts and accepted tokens: steps by k, gaps between steps."""

from __future__ import annotations

import time

from prometheus_client import Counter, Gauge, Histogram

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
        _DRAFTER.labels(drafter).set(1)
        self._ended = 0.0

    def begin(self) -> None:
        """A step begins that was not launched ahead."""
        if self._ended:
            _GAP.observe(time.perf_counter() - self._ended)

    def end(self, k: int | None, launched_ahead: bool) -> None:
        """A decode step of this k, or a prefill chunk (None), has ended; no gap if the next step is launched."""
        self._ended = time.perf_counter()
        if launched_ahead:
            _GAP.observe(0.0)
        if k is None:
            _CHUNKS.inc()
        else:
            _STEPS.labels(str(k)).inc()
