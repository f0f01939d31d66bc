"""The facts of a bundle that the engine needs, and the chunks that a prompt runs in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model.cache import KEY_TILE
from trnspec.bundle.opening import Bundle
from trnspec.bundle.spec import logprobs_prompt


class Chunk(NamedTuple):
    """`size` tokens of a prompt from position `first` on, in the graph of `rows` rows that attends `keys` positions."""

    first: int
    size: int
    rows: int
    keys: int

    @property
    def end(self) -> int:
        """The position after it."""
        return self.first + self.size


@dataclass(frozen=True)
class EngineConfig:
    """The limits of a bundle's graphs.

    `ks`: the k > 0 of its steps, ascending. `pool`: KV blocks, the null block 0 included, but not the
    spare ones. `prompts`: (rows, keys) of the prefill graphs, ascending. `host_drafts`: drafts are inputs of a step.
    `min_last_chunk`: minimum number of tokens of a prompt's last chunk, for a drafter that reads its last rows.
    `greedy`: no graphs with filters or logits processors.
    """

    ks: tuple[int, ...]
    batch: int
    max_len: int
    buckets: tuple[int, ...]
    vocab_size: int
    pool: int
    prompts: tuple[tuple[int, int], ...]
    host_drafts: bool = False
    min_last_chunk: int = 0
    greedy: bool = False

    @property
    def k(self) -> int:
        return max(self.ks, default=0)

    def graph_k(self, drafts: int, full_sampling: bool = False) -> int:
        """The k of the smallest graph for this number of drafts; full-sampling graphs have the largest k."""
        return self.k if full_sampling else next(k for k in (0, *self.ks) if k >= drafts)

    def bucket(self, length: int) -> int:
        """The smallest bucket for this number of positions, or the largest one."""
        return next((bucket for bucket in self.buckets if length <= bucket), self.max_len)

    def blocks(self, length: int) -> int:
        """The KV blocks of this number of positions, at most those of a sequence."""
        return -(-min(length, self.max_len) // KEY_TILE)

    def chunk(self, first: int, length: int, logprobs: bool = False) -> Chunk:
        """The next chunk of a prompt of `length` tokens whose first ones are cached.

        Uses the smallest graph that holds the remaining tokens, if they fill half of it, else the largest they fill.
        """
        first = min(first, max(0, length - self.min_last_chunk))
        prompts = (logprobs_prompt(self.prompts, self.max_len),) if logprobs else self.prompts
        left, sizes = length - first, sorted({rows for rows, _ in prompts})
        single = next((rows for rows in sizes if left <= rows <= max(2 * left, sizes[0])), 0)
        rows = single or max(rows for rows in sizes if rows <= left)
        size = min(left, rows)
        return Chunk(first, size, rows, min(keys for r, keys in prompts if r == rows and keys >= first + size))

    def chunks(self, length: int, logprobs: bool = False) -> Iterator[Chunk]:
        first = 0
        while first < length:
            yield (chunk := self.chunk(first, length, logprobs))
            first = chunk.end


def engine_config(bundle: Bundle) -> EngineConfig:
    spec = bundle.spec
    limits = spec.ks, spec.batch, spec.max_len, spec.buckets, spec.target_config.vocab_size, spec.usable, spec.prompts
    last_chunk = spec.k if any("K" in state.axes.split() for state in spec.drafter_type.state_spec) else 0
    return EngineConfig(*limits, spec.host_drafts, last_chunk, spec.graphs == "greedy")
