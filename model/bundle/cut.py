"""One weight of a bundle: which tensors of a checkpoint it is made of, and what a rank takes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """What a rank takes of a tensor: `axis` None is a copy; `by` names what the axis is counted in."""

    axis: int | None = None
    by: str = "even"


COPY, ROWS, COLUMNS = Cut(), Cut(0), Cut(1)


def _first(tensor: Tensor, _: int) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Weight:
    """One weight of a bundle: its parts, Hugging Face's name and cut of each, made one by `join` with the head dim; its
    dtype, by default the build's."""

    ours: str
    bundle: str
    parts: tuple[tuple[str, Cut], ...]
    join: Callable[..., Tensor] = _first
    dtype: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is its one part as it is, so that rows of it are rows of that."""
        return self.join is _first
