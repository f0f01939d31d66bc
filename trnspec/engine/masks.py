"""Token masks of requests: grammars, allowed ids, bad words, min_tokens.

A mask is int32 words with a bit for each id (`model/graph_io.py`). Row n of a step samples under the mask after its
first n drafts, so that a step emits the tokens that steps of one token would emit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from model.errors import UserError
from model.graph_io import mask_words
from trnspec.engine.request import MaskFn, Request


class ConstrainedDraft:
    """The drafts of a sequence that its masks allow, at most `limit`, and the mask of each row."""

    def __init__(self, allowed: MaskFn, ids: Sequence[int], limit: int, words: int) -> None:
        self._allowed, self._ids, self._limit, self._words = allowed, ids, limit, words
        self.drafts: list[int] = []
        self.masks = [_checked(allowed(ids), words)]
        self.force()

    def propose(self, drafts: Sequence[int]) -> None:
        """Replace the drafts by these, up to the first that a mask excludes or that ends the output."""
        same = common_prefix_len(self.drafts, drafts)
        del self.drafts[same:], self.masks[same + 1 :]
        for draft in drafts[same : self._limit]:
            if not (allows(self.masks[-1], draft) and self._append(draft)):
                break

    def follow(self, drafts: list[int]) -> list[int]:
        """Host-side drafts as far as the masks allow them, and the ids that are forced after them."""
        self.propose(drafts)
        self.force()
        return self.drafts

    def force(self) -> None:
        """Append drafts while a mask allows a single id."""
        while len(self.drafts) < self._limit and (only := _single(self.masks[-1])) is not None and self._append(only):
            pass

    def _append(self, draft: int) -> bool:
        mask = self._allowed([*self._ids, *self.drafts, draft])
        if mask is None:
            return False
        self.masks.append(_checked(mask, self._words))
        self.drafts.append(draft)
        return True


def mask_fn(request: Request, vocab_size: int) -> MaskFn | None:
    """The masks of a request: its grammar's, without the ids that its parameters exclude; None if it has neither.

    A mask may exclude every id: no token can be sampled then, and the request ends with an error.
    """
    params, grammar = request.params, request.allowed
    if not params.masks:
        return grammar
    # ids, once `LLM` has tokenized text
    words: list[tuple[Any, ...]] = [tuple(word) for word in params.bad_words]
    never = [word[0] for word in words if len(word) == 1]
    always = mask_of(params.allowed_token_ids or range(vocab_size), vocab_size) & ~mask_of(never, vocab_size)
    not_ended = always & ~mask_of(request.ends or request.stop_ids, vocab_size)

    def allowed(ids: Sequence[int]) -> np.ndarray | None:
        mask = not_ended if len(ids) < params.min_tokens else always
        if grammar:
            of_grammar = grammar(ids)
            if of_grammar is None:
                return None
            mask = mask & _checked(of_grammar, len(mask))
        last = [word[-1] for word in words if len(word) > 1 and tuple(ids[len(ids) + 1 - len(word) :]) == word[:-1]]
        return mask & ~mask_of(last, vocab_size) if last else mask

    return allowed


def mask_of(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """(W,) the mask that allows these ids."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def common_prefix_len(ids: Sequence[int], others: Sequence[int]) -> int:
    """The length of the common prefix of two lists."""
    different = (n for n, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(different, min(len(ids), len(others)))


def masks_of_rows(drafts: Mapping[int, ConstrainedDraft], batch: int, rows: int, words: int) -> np.ndarray:
    """(B, N, W) the masks of a step's rows by slot; every id is allowed where there is none."""
    masks_BNW = np.full((batch, rows, words), -1, np.int32)
    for slot, draft in drafts.items():
        masks = draft.masks[:rows]
        masks_BNW[slot, : len(masks)] = masks
    return masks_BNW


def allows(mask_W: np.ndarray, token: int) -> bool:
    """Whether a mask has the bit of an id."""
    return bool(mask_W[token // 32] >> token % 32 & 1)


def _single(mask_W: np.ndarray) -> int | None:
    """The id of a mask that allows a single one."""
    (places,) = np.nonzero(mask_W)
    bits = int(mask_W[places[0]]) & 0xFFFFFFFF if len(places) == 1 else 0
    return int(places[0]) * 32 + bits.bit_length() - 1 if bits and not bits & (bits - 1) else None


def _checked(mask: np.ndarray | None, words: int) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.shape != (words,) or mask.dtype != np.int32:
        raise UserError(f"a mask is {mask.dtype} of shape {mask.shape}; it must have {words} int32 words")
    return mask
