"""Masks of a step: the ids that each row of a sequence may draw, as far as its drafts are known.

A mask is int32 words with a bit for each id (`model/graph_io.py`). A grammar is a function of ids: it is called with
the new ids and drafts after them, which may be rejected, so it commits to none of them. Row n of a sequence draws under
the mask after n drafts, so a step emits the ids that steps of one token would emit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from model.errors import UserError
from model.graph_io import mask_words

if TYPE_CHECKING:
    from trnspec.engine.request import Request

# the mask of the id after these new ones; None if the text ends with them
Allowed = Callable[[Sequence[int]], "np.ndarray | None"]


class Walk:
    """The drafts of a sequence that its grammar allows in one step, at most `most`, and the masks of their rows."""

    def __init__(self, allowed: Allowed, ids: Sequence[int], most: int, words: int) -> None:
        self._allowed, self._ids, self._most, self._words = allowed, ids, most, words
        self.drafts: list[int] = []
        self.masks = [_checked(allowed(ids), words)]
        self.force()

    def along(self, drafts: Sequence[int]) -> None:
        """Follow these drafts instead, to the first that the grammar refuses.

        A draft that ends the text is not followed: the target draws it by itself.
        """
        same = shared(self.drafts, drafts)
        del self.drafts[same:], self.masks[same + 1 :]
        for draft in drafts[same : self._most]:
            if not (allows(self.masks[-1], draft) and self._follow(draft)):
                break

    def force(self) -> None:
        """Go on while a mask allows one id alone."""
        while len(self.drafts) < self._most and (only := _only(self.masks[-1])) is not None and self._follow(only):
            pass

    def _follow(self, draft: int) -> bool:
        mask = self._allowed([*self._ids, *self.drafts, draft])
        if mask is None:
            return False
        self.masks.append(_checked(mask, self._words))
        self.drafts.append(draft)
        return True


def limited(request: Request, vocabulary: int) -> Allowed | None:
    """The masks of a request: its grammar's, less the ids that its parameters forbid; None where it has none.

    A word's last id is forbidden after its others, an end before `min_tokens` ids. Limits that would leave no id are
    dropped: those of ends first, then the others.
    """
    params, grammar = request.params, request.allowed
    if not params.limits:
        return grammar
    every = mask_of(range(vocabulary), vocabulary)
    listed = mask_of(params.allowed_token_ids, vocabulary) if params.allowed_token_ids else every
    words: list[tuple[Any, ...]] = [tuple(word) for word in params.bad_words]
    ends = mask_of(request.ends or request.stop_ids, vocabulary)

    def allowed(ids: Sequence[int]) -> np.ndarray | None:
        mask = grammar(ids) if grammar else every
        if mask is None:
            return None
        mask = _checked(mask, len(every))
        last = (word[-1] for word in words if tuple(ids[len(ids) + 1 - len(word) :]) == word[:-1])
        left = mask & listed & ~mask_of(last, vocabulary)
        without_ends = left & ~ends if len(ids) < params.min_tokens else left
        return next((m for m in (without_ends, left) if m.any()), mask)

    return allowed


def mask_of(ids: Iterable[int], vocabulary: int) -> np.ndarray:
    """The mask that allows these ids."""
    bits = np.zeros(32 * mask_words(vocabulary), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids two lists have in common from their beginning on."""
    different = (n for n, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(different, min(len(ids), len(others)))


def masks_of_rows(walks: Mapping[int, Walk], batch: int, rows: int, words: int) -> np.ndarray:
    """(B, N, W) the masks of rows, those of slot b in row b; where none is known, every id is allowed."""
    words_BNW = np.full((batch, rows, words), -1, np.int32)
    for slot, walk in walks.items():
        known = walk.masks[:rows]
        words_BNW[slot, : len(known)] = known
    return words_BNW


def allows(mask_W: np.ndarray, token: int) -> bool:
    """Whether a mask has the bit of an id."""
    return bool(mask_W[token // 32] >> token % 32 & 1)


def _only(mask_W: np.ndarray) -> int | None:
    """The one id that a mask allows."""
    (places,) = np.nonzero(mask_W)
    bits = int(mask_W[places[0]]) & 0xFFFFFFFF
    return int(places[0]) * 32 + bits.bit_length() - 1 if len(places) == 1 and not bits & (bits - 1) else None


def _checked(mask: np.ndarray | None, words: int) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.shape != (words,) or mask.dtype != np.int32 or not mask.any():
        raise UserError(
            f"a mask is {mask.dtype} of shape {mask.shape}, {'not ' if mask.any() else ''}empty; it must allow "
            f"an id and have {words} int32 words"
        )
    return mask
