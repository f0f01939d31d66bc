"""A request's grammar in the worker: the masks behind drafts, by vLLM's own backends.

vLLM gives the mask of the next id alone: it validates drafts before a step, and ours are made inside of it. So the
worker has a matcher of its own beside vLLM's, compiled from the same specification. The next id obeys vLLM's mask. Our
matcher looks ahead and rolls back over rejected drafts, so both matchers follow the emitted ids.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trnspec.engine.masks import shared

logger = logging.getLogger("vllm.trnspec")


class Grammars:
    """The grammars of requests, compiled in vLLM's threads beside the steps."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._manager: Any = None

    def of(self, name: str, sampling: Any) -> Grammar:
        """A request's grammar; until it is compiled, it looks at no draft."""
        # vLLM's modules request the platform while they are imported
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415
        from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: PLC0415

        if self._manager is None:
            self._manager = StructuredOutputManager(self._config)
        structured = StructuredOutputRequest.from_sampling_params(sampling)
        # with a reasoning parser a grammar begins somewhere in the text, where vLLM alone knows
        if structured is not None and self._manager.reasoner_cls is None:
            request = SimpleNamespace(request_id=name, sampling_params=sampling, structured_output_request=structured)
            self._manager.grammar_init(request)
        return Grammar(name, structured, self._manager)


class Grammar:
    """The masks of a request as a function of its new ids: vLLM's for the next one, its own matcher's behind drafts.

    A matcher that fails is left out: the request goes on under vLLM's masks, a token a step.
    """

    def __init__(self, name: str, structured: Any, manager: Any) -> None:
        self.name, self.structured, self.manager = name, structured, manager
        # vLLM's mask of the next id, until it is used
        self.next: np.ndarray | None = None
        # the ids that the matcher has been moved by
        self._ids: list[int] = []

    def __call__(self, ids: Sequence[int]) -> np.ndarray | None:
        if self.next is not None:
            mask, self.next = self.next, None
            return mask
        matcher = self.structured.grammar if self.structured is not None else None
        # not compiled yet; vLLM itself ends a request whose grammar fails
        if matcher is None or isinstance(matcher, Exception):
            return None
        try:
            return self._ahead(matcher, list(ids))
        except Exception:
            logger.exception("the matcher of %s failed; its drafts are not checked any more", self.name)
            self.structured = None
            return None

    def _ahead(self, matcher: Any, ids: list[int]) -> np.ndarray | None:
        """The matcher's mask behind these ids; None if it allows nothing there, or the text ends."""
        if not self._moved(matcher, ids):
            return None
        words = self.manager.backend.allocate_token_bitmask(1)
        matcher.fill_bitmask(words, 0)
        mask: np.ndarray = words[0].numpy()
        return mask if mask.any() else None

    def _moved(self, matcher: Any, ids: list[int]) -> bool:
        """Move the matcher to these ids; False if the text ends with them or before."""
        same = shared(self._ids, ids)
        if back := len(self._ids) - same:
            matcher.rollback(back)
            del self._ids[same:]
        for token in ids[same:]:
            if matcher.is_terminated():
                return False
            if not matcher.accept_tokens(self.name, [token]):
                raise ValueError(f"the grammar refuses the id {token}, which a mask of it allowed")
            self._ids.append(token)
        return not matcher.is_terminated()
