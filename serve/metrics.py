"""The worker's own figures beside vLLM's: tokens a step, drafts kept, drafts offered, the host's gap between steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from model.serving.engine import Engine, Event

_GAPS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_STEPS = Counter("trnspec_steps", "Steps of the target, by whether drafts were verified in them", ["speculative"])
_TOKENS = Counter("trnspec_tokens", "Ids that steps emitted, those that are cut later among them")
_SEQUENCES = Counter("trnspec_sequence_steps", "Steps times the requests in each; tokens over this is tokens a step")
_GAP = Histogram("trnspec_host_gap_seconds", "Seconds from a step's end to the next step's begin", buckets=_GAPS)


@dataclass
class Metrics:
    """Counts of this worker; a gap is counted between steps only, while requests run."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    _ended: float | None = None

    def begin(self) -> None:
        """A step begins."""
        if self._ended is not None:
            gap = time.perf_counter() - self._ended
            self.gaps.append(gap)
            del self.gaps[:-4096]
            _GAP.observe(gap)

    def end(self, prompt: bool, events: list[Event], engine: Engine) -> None:
        """A step has ended; a prompt's is not one of the target's steps."""
        self._ended = time.perf_counter() if engine.busy else None
        if prompt or not events:
            return
        emitted = sum(len(e.ids) for e in events)
        self.steps, self.sequences, self.tokens = self.steps + 1, self.sequences + len(events), self.tokens + emitted
        _STEPS.labels(str(engine.speculative)).inc()
        _SEQUENCES.inc(len(events))
        _TOKENS.inc(emitted)

    def summary(self) -> str:
        """One line for people."""
        per_step = self.tokens / self.sequences if self.sequences else 0.0
        gap = 1e3 * sorted(self.gaps)[len(self.gaps) // 2] if self.gaps else 0.0
        return f"{self.steps} steps, {per_step:.2f} tokens a step and request, host gap {gap:.2f} ms (p50, wall)"
