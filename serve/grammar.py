"""What limits or ends a request's output, by vLLM's rules: its grammar, and its stop strings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trnspec.engine.masks import common_prefix_len

logger = logging.getLogger("vllm.trnspec")


class Grammar:
    """A `MaskFn`: vLLM's mask for the next token, after drafts that of vLLM's matcher, which `restore` moves back.

    While the request is thinking, drafts are free up to the one that ends it: the grammar begins with a step, under
    vLLM's mask. If the matcher fails, a step accepts no draft.
    """

    def __init__(self, request: Any, manager: Any) -> None:
        self.request, self.manager = request, manager
        # vLLM's mask of the next token, until it is used; and that of the last step
        self.next: np.ndarray | None = None
        self._mask: np.ndarray | None = None
        # the drafts that the matcher has accepted
        self._drafts = list[int]()
        self._failed = False

    def __call__(self, ids: Sequence[int]) -> np.ndarray | None:
        if self.next is not None:
            self._mask, self.next = self.next, None
            return self._mask
        try:
            return None if self._failed else self._after(list(ids[len(self.request.output_token_ids) :]))
        except Exception:
            logger.exception("the grammar of %s failed; it gets one token a step from here on", self.request.request_id)
            self._failed = True
            return None

    def restore(self) -> None:
        """Move the matcher back to the sampled tokens, where vLLM goes on."""
        if self._drafts:
            self.request.structured_output_request.grammar.rollback(len(self._drafts))
            self._drafts.clear()

    def _after(self, drafts: list[int]) -> np.ndarray | None:
        """The mask after these drafts; None if it allows nothing, or the grammar begins or ends with them."""
        # the first row under the grammar's mask, 0 unless the request is thinking
        if start := self.manager._get_constraint_bounds(self.request, drafts).constraint_start:
            return self._mask if start > len(drafts) else None
        matcher = self.request.structured_output_request.grammar
        if not self._advance(matcher, drafts):
            return None
        words = self.manager.backend.allocate_token_bitmask(1)
        matcher.fill_bitmask(words, 0)
        mask: np.ndarray = words[0].numpy()
        return mask if mask.any() else None

    def _advance(self, matcher: Any, drafts: list[int]) -> bool:
        """Advance the matcher to these drafts; False if it terminates with them or before."""
        same = common_prefix_len(self._drafts, drafts)
        if back := len(self._drafts) - same:
            matcher.rollback(back)
            del self._drafts[same:]
        for token in drafts[same:]:
            if matcher.is_terminated():
                return False
            if not matcher.accept_tokens(self.request.request_id, [token]):
                raise ValueError(f"the grammar refuses the id {token}, which a mask of it allowed")
            self._drafts.append(token)
        return not matcher.is_terminated()


def stop_strings(
    vllm_config: Any, prompt: Sequence[int], sampling: Any
) -> Callable[[Sequence[int]], int | None] | None:
    """A `Request.cut` that ends a request with the token in which vLLM's detokenizer finds a stop string."""
    # vLLM's modules request the platform while they are imported
    from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # noqa: PLC0415

    if not sampling.stop:
        return None
    fields = {"sampling_params": sampling, "prompt_token_ids": list(prompt), "prompt_embeds": None, "request_id": ""}
    tokenizer, request = cached_tokenizer_from_config(vllm_config.model_config), SimpleNamespace(**fields)
    text = IncrementalDetokenizer.from_new_request(tokenizer, request)  # type: ignore[arg-type]

    def cut(ids: Sequence[int]) -> int | None:
        return len(ids) if text.update(list(ids[text.num_output_tokens() :]), stop_terminated=False) else None

    return cut
