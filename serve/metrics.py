"""The worker's own figures beside vLLM's: tokens of a step, drafts offered and kept, the host's gap between steps."""

from __future__ import annotations

import collections
import time

from prometheus_client import Counter, Gauge, Histogram

from model.serving.engine import Event

_GAPS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# an Info is not shown where several processes share their metrics
_DRAFTER = Gauge(
    "trnspec_drafter_info",
    "The bundle's drafter; none where speculation is off",
    ["kind"],
    multiprocess_mode="mostrecent",
)
_STEPS = Counter("trnspec_steps", "Steps of the target; a prefill is none")
_SEQUENCES = Counter("trnspec_sequence_steps", "Steps, counted for each request in them")
_TOKENS = Counter("trnspec_tokens", "Ids that steps emitted, including those that vLLM cuts later")
_DRAFTED = Counter("trnspec_drafted", "Drafts that a step might have accepted")
_KEPT = Counter("trnspec_drafts_kept", "Drafts that a step accepted")
_OF_K = Counter("trnspec_steps_of_k", "Steps of the target by the k of their graph", ["k"])
_CHUNKS = Counter("trnspec_chunks", "Chunks of prompts, each a run of one graph")
_GAP = Histogram("trnspec_host_gap_seconds", "Wall seconds between two steps", buckets=_GAPS_S)


class Metrics:
    """Counts of this worker. A gap is counted only where a request waited through it."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        _DRAFTER.labels(drafter).set(1)
        self.steps = self.sequences = self.tokens = self.drafted = self.kept = self.gaps = self.followed = 0
        self.gap_s = 0.0
        self.of_k = collections.Counter[int]()
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
        emitted, drafted = sum(len(event.ids) for event in events), sum(event.drafted for event in events)
        kept = sum(event.accepted for event in events)
        self.drafted, self.kept = self.drafted + drafted, self.kept + kept
        _DRAFTED.inc(drafted)
        _KEPT.inc(kept)
        self.steps, self.sequences, self.tokens = self.steps + 1, self.sequences + len(events), self.tokens + emitted
        k = events[0].k if events else 0
        self.of_k[k] += 1
        _OF_K.labels(str(k)).inc()
        _STEPS.inc()
        _SEQUENCES.inc(len(events))
        _TOKENS.inc(emitted)

    def summary(self) -> str:
        """One line for people."""
        per_step, gap_ms = self.tokens / max(1, self.sequences), 1e3 * self.gap_s / max(1, self.gaps)
        return (
            f"{self.steps} steps, {per_step:.2f} tokens a step and request, {self.kept} of {self.drafted} drafts kept "
            f"(drafter {self.drafter}), "
            f"steps of k {', '.join(f'{k}: {n}' for k, n in sorted(self.of_k.items()))}, "
            f"host gap {gap_ms:.2f} ms (mean of {self.gaps}, wall; {self.followed} steps were handed over before)"
        )
