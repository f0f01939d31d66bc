"""A request's grammar in the worker: vLLM gives the mask of the next token, a second matcher those after drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trnspec.engine.masks import common_prefix_len

logger = logging.getLogger("vllm.trnspec")


class Grammars:
    """The grammars of requests, compiled in vLLM's threads while steps run."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._manager: Any = None

    def of(self, name: str, sampling: Any) -> Grammar:
        """A request's grammar; until it is compiled, no draft passes it."""
        # vLLM's modules request the platform while they are imported
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415
        from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: PLC0415

        if self._manager is None:
            self._manager = StructuredOutputManager(self._config)
        structured = StructuredOutputRequest.from_sampling_params(sampling)
        # with a reasoning parser only vLLM knows where in the output the grammar begins
        if structured is not None and self._manager.reasoner_cls is None:
            request = SimpleNamespace(request_id=name, sampling_params=sampling, structured_output_request=structured)
            self._manager.grammar_init(request)
        return Grammar(name, structured, self._manager)


class Grammar:
    """A `MaskFn`: vLLM's mask for the next token, the matcher's after drafts; if that fails, one token a step."""

    def __init__(self, name: str, structured: Any, manager: Any) -> None:
        self.name, self.structured, self.manager = name, structured, manager
        # vLLM's mask of the next id, until it is used
        self.next: np.ndarray | None = None
        # the tokens that the matcher has accepted
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
            logger.exception("the matcher of %s failed; it gets one token a step from here on", self.name)
            self.structured = None
            return None

    def _ahead(self, matcher: Any, ids: list[int]) -> np.ndarray | None:
        """The matcher's mask after these tokens; None if it allows nothing there or has terminated."""
        if not self._moved(matcher, ids):
            return None
        words = self.manager.backend.allocate_token_bitmask(1)
        matcher.fill_bitmask(words, 0)
        mask: np.ndarray = words[0].numpy()
        return mask if mask.any() else None

    def _moved(self, matcher: Any, ids: list[int]) -> bool:
        """Advance the matcher to these tokens; False if it terminates with them or before."""
        same = common_prefix_len(self._ids, ids)
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
