"""A grammar in the worker: its masks are those of a fresh matcher, whatever drafts came before."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM
from trnspec.engine.masks import ConstrainedDraft, allows

pytest.importorskip("vllm", reason=NO_VLLM)
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from serve.grammar import Grammar

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "kind"],
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "kind": {"enum": ["odd", "even"]}},
}  # fmt: skip
K = 7


def grammar_of(schema: dict[str, Any] = SCHEMA, stop_ids: tuple[int, ...] = ()) -> Any:
    """A grammar for the demo's tokenizer with a matcher of vLLM's backend, and no mask of vLLM's."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "demo/target/tokenizer.json"))
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=True),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=None,
    )
    vocabulary = json.loads((ROOT / "demo/target/config.json").read_text(encoding="utf-8"))["vocab_size"]
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocabulary)
    matcher = backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(schema), stop_token_ids={*stop_ids})
    return of_matcher(matcher, backend)


def of_matcher(matcher: Any, backend: Any = None, reasoner: Any = None, prompt: Sequence[int] = ()) -> Grammar:
    """A grammar with vLLM's rule where it begins, and no mask of vLLM's."""
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.backend, manager.enable_in_reasoning = backend, False
    manager.reasoner_cls = type(reasoner) if reasoner else None
    request = Request(
        "test", [*prompt] or [1], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), None
    )
    request.structured_output_request = StructuredOutputRequest(
        StructuredOutputsParams(regex="a"), matcher, reasoner=reasoner
    )
    return Grammar(request, manager)


def commit(grammar: Grammar, ids: Sequence[int]) -> None:
    """Let vLLM accept sampled tokens, as after a step."""
    grammar.restore()
    for token in ids:
        grammar.request.append_output_token_ids(token)
    assert grammar.manager.accept_tokens(grammar.request, [*ids])


def _ids(mask: np.ndarray) -> list[int]:
    return [i for i in range(32 * len(mask)) if allows(mask, i)]


def test_masks_do_not_depend_on_earlier_drafts() -> None:
    rng, stop = random.Random(1), (0,)
    for _ in range(2):
        grammar, accepted = grammar_of(stop_ids=stop), list[int]()
        for _ in range(12):
            drafted = ConstrainedDraft(grammar, accepted, K, len(grammar.manager.backend.allocate_token_bitmask(1)[0]))
            for _ in range(2):
                drafted.propose([rng.choice([0, *range(1, 60), *_ids(drafted.masks[-1])[:1]]) for _ in range(K)])
            while len(drafted.drafts) < K and drafted._append(rng.choice(_ids(drafted.masks[-1]))):
                pass
            fresh = grammar_of(stop_ids=stop)
            masks = [fresh([*accepted, *drafted.drafts[:n]]) for n in range(len(drafted.masks))]
            assert all((one == two).all() for one, two in zip(drafted.masks, masks, strict=True))
            count = rng.randint(0, len(drafted.drafts))
            # the target samples a token after the accepted ones
            accepted += [*drafted.drafts[:count], rng.choice(_ids(drafted.masks[count]))]
            commit(grammar, accepted[len(accepted) - count - 1 :])
            if accepted[-1] in stop or grammar(accepted) is None:
                break


def test_vllm_s_mask_is_that_of_the_next_token_only() -> None:
    grammar = grammar_of()
    grammar.next = np.full(4, 5, np.int32)
    assert (grammar([]) == 5).all()
    assert not np.array_equal(grammar([]), np.full(4, 5, np.int32))


@pytest.mark.parametrize("broken", [{"accept_tokens.return_value": False}, {"fill_bitmask.side_effect": RuntimeError}])
def test_a_matcher_that_fails_is_left_out_and_vllm_s_masks_go_on(broken: dict[str, Any]) -> None:
    matcher = mock.Mock(**{"is_terminated.return_value": False} | broken)
    grammar = of_matcher(matcher, mock.Mock())
    assert grammar([1]) is None
    assert grammar._failed
    grammar.next = np.full(4, 5, np.int32)
    assert (grammar([1, 2]) == 5).all()


class Matcher:
    """Ends with the id 0, and allows nothing after the id 9."""

    def __init__(self) -> None:
        self.ids = list[int]()

    def is_terminated(self) -> bool:
        return self.ids[-1:] == [0]

    def accept_tokens(self, name: str, ids: list[int]) -> bool:
        accepted = not self.is_terminated()
        self.ids += ids
        return accepted

    def rollback(self, count: int) -> None:
        del self.ids[-count:]

    def fill_bitmask(self, words: torch.Tensor, row: int) -> None:
        words[row] = -(self.ids[-1:] != [9])


def test_no_draft_passes_the_end_of_a_grammar_or_a_dead_end() -> None:
    backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.ones((rows, 2), dtype=torch.int32))
    grammar = of_matcher(Matcher(), backend)
    allowed = [grammar(ids) is not None for ids in ([], [1], [1, 0], [1, 0, 5], [1, 9], [2], [2, 9, 3])]
    assert allowed == [True, True, False, False, False, True, True]
    assert not grammar._failed, "the matcher has not failed"


THINK, CLOSE, CALL, RESULT = (f"<{name}>" for name in ("think", "/think", "tool_call", "tool_response"))


def test_the_grammar_begins_where_vllm_s_parser_of_qwen3_ends_the_reasoning() -> None:
    """Token by token as for every block; drafts are free up to the one that ends it, which is never accepted."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "demo/target/tokenizer.json"))
    tokenizer.add_special_tokens({"additional_special_tokens": [THINK, CLOSE, CALL, "</tool_call>", RESULT]})
    think, close, call = tokenizer.convert_tokens_to_ids([THINK, CLOSE, CALL])
    parser, rng = ReasoningParserManager.get_reasoning_parser("qwen3"), random.Random(5)
    backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.ones((rows, 2), dtype=torch.int32))
    for prompt, begins_at_once in (([think], False), ([5, 6], False), ([think, 7, close], True)):
        for _ in range(40):
            ids = [rng.randrange(1, 60) for _ in range(rng.randrange(12))]
            grammar, at_once = (of_matcher(Matcher(), backend, parser(tokenizer), prompt) for _ in range(2))
            grammar.next, mask = np.full(2, 6, np.int32), np.full(2, 6, np.int32)
            assert (grammar([]) == mask).all(), "vLLM's mask"
            if begins_at_once:
                assert not np.array_equal(grammar([7]), mask)
                continue
            end, place = rng.choice((close, call)), rng.randrange(len(ids) + 1)
            commit(grammar, ids[:place])
            assert all(np.array_equal(grammar(ids[:n]), mask) for n in range(place + 1, len(ids) + 1))
            assert grammar([*ids, end]) is None
            commit(grammar, [*ids[place:], end])
            commit(at_once, [*ids, end])
            begun = [one.request.structured_output_request.grammar.ids for one in (grammar, at_once)]
            assert begun == ([[], []] if end == close else [[call], [call]])
            assert not np.array_equal(grammar([*ids, end, 7]), mask)
