"""One request's record: when its text came, how many tokens the server counted, what went wrong."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Times are seconds since the request was sent, or was due when arrivals have a rate.

    `text_at` holds the arrival of every event with text; the first may carry several tokens, so no
    count of events is a count of tokens: `tokens` is the server's own, from `usage`.
    """

    variant: str
    case: str
    index: int
    text_at: tuple[float, ...] = ()
    end_s: float = 0.0
    tokens: int | None = None
    prompt_tokens: int | None = None
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    lines: int = 0
    finish: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first event with text; a line with a role alone is not text."""
        return self.text_at[0]

    @property
    def e2e_s(self) -> float:
        """Time to the last event of a choice: its text or its finish; usage and [DONE] come after it."""
        return self.end_s

    @property
    def itl_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1): the mean time of a token after the first; None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1) if self.tokens and self.tokens > 1 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between events with text, each of one or more tokens."""
        return tuple(b - a for a, b in itertools.pairwise(self.text_at))

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.e2e_s if self.tokens and self.e2e_s > 0 else None

    def row(self) -> dict[str, Any]:
        """The sample and its figures as a JSON row."""
        figures = {} if self.error else {"ttft_s": self.ttft_s, "e2e_s": self.e2e_s, "itl_s": self.itl_s}
        return {"source": "wall"} | dataclasses.asdict(self) | figures
