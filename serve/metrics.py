"""The worker's own figures beside vLLM's: tokens of a step, drafts offered and kept, the host's gap between steps."""

from __future__ import annotations

import collections
import time

from prometheus_client import Counter, Gauge, Histogram

from trnspec.engine.engine import Event

_GAPS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# an Info is not shown where several processes share their metrics
_DRAFTER = Gauge(
    "trnspec_drafter_info",
    "The bundle's drafter; none where speculation is off",
    ["kind"],
    multiprocess_mode="mostrecent",
)
_COUNTERS = {
    "steps": Counter("trnspec_steps", "Steps of the target; a prefill is none"),
    "sequences": Counter("trnspec_sequence_steps", "Steps, counted for each request in them"),
    "tokens": Counter("trnspec_tokens", "Ids that steps emitted, including those that vLLM cuts later"),
    "drafted": Counter("trnspec_drafted", "Drafts that a step might have accepted"),
    "kept": Counter("trnspec_drafts_kept", "Drafts that a step accepted"),
}
_OF_K = Counter("trnspec_steps_of_k", "Steps of the target by the k of their graph", ["k"])
_CHUNKS = Counter("trnspec_chunks", "Chunks of prompts, each a run of one graph")
_GAP = Histogram("trnspec_host_gap_seconds", "Wall seconds between two steps", buckets=_GAPS_S)
# steps until their counts are handed to Prometheus, if no request ends
_OFTEN = 32


class Metrics:
    """Counts of this worker. A gap is counted only where a request waited through it.

    Prometheus gets the counts of several steps at once, all of them when a request ends: its counters are files that
    several processes share, and take longer than the rest of a step's books.
    """

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        _DRAFTER.labels(drafter).set(1)
        # by counter, or by k
        self.counts, self._published = collections.Counter[str | int](), collections.Counter[str | int]()
        self.gaps, self.followed, self.gap_s = 0, 0, 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        """A step begins; its requests waited since the last one ended."""
        if self._ended is not None:
            self._gap(time.perf_counter() - self._ended)

    def _gap(self, gap_s: float) -> None:
        self.gaps, self.gap_s = self.gaps + 1, self.gap_s + gap_s
        _GAP.observe(gap_s)

    def end(self, prompt: bool, events: list[Event], followed: bool) -> None:
        """A step has ended; a prefill is none of the target's steps. A step that is followed left no gap: the next
        work was handed over before its end."""
        self._ended = time.perf_counter()
        if followed:
            self.followed += 1
            self._gap(0.0)
        if prompt:
            _CHUNKS.inc()
            return
        k = events[0].k if events else 0
        self.counts[k] += 1
        self.counts["steps"] += 1
        self.counts["sequences"] += len(events)
        for event in events:
            self.counts["tokens"] += len(event.ids)
            self.counts["drafted"] += event.drafted
            self.counts["kept"] += event.accepted
        if self.counts["steps"] % _OFTEN == 0 or any(event.result for event in events):
            self.publish()

    def publish(self) -> None:
        """Hand to Prometheus what was counted since the last time."""
        for name, count in (self.counts - self._published).items():
            counter = _OF_K.labels(str(name)) if isinstance(name, int) else _COUNTERS[name]
            counter.inc(count)
        self._published = self.counts.copy()

    def summary(self) -> str:
        """One line for people."""
        n, gap_ms = self.counts, 1e3 * self.gap_s / max(1, self.gaps)
        of_k = sorted((k, count) for k, count in n.items() if isinstance(k, int))
        return (
            f"{n['steps']} steps, {n['tokens'] / max(1, n['sequences']):.2f} tokens a step and request, {n['kept']} of "
            f"{n['drafted']} drafts kept (drafter {self.drafter}), "
            f"steps of k {', '.join(f'{k}: {count}' for k, count in of_k)}, "
            f"host gap {gap_ms:.2f} ms (mean of {self.gaps}, wall; {self.followed} steps were handed over before)"
        )
