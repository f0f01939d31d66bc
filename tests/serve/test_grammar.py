"""A grammar in the worker: its masks are those of a fresh matcher, whatever drafts came before."""

from __future__ import annotations

import json
import random
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
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from serve.grammar import Grammar, Grammars

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
    return Grammar("test", SimpleNamespace(grammar=matcher), SimpleNamespace(backend=backend))


def _ids(mask: np.ndarray) -> list[int]:
    return [i for i in range(32 * len(mask)) if allows(mask, i)]


def test_masks_do_not_depend_on_earlier_drafts() -> None:
    rng, stop = random.Random(1), (0,)
    for _ in range(2):
        grammar, kept = grammar_of(stop_ids=stop), list[int]()
        for _ in range(12):
            drafted = ConstrainedDraft(grammar, kept, K, len(grammar.manager.backend.allocate_token_bitmask(1)[0]))
            for _ in range(2):
                drafted.propose([rng.choice([0, *range(1, 60), *_ids(drafted.masks[-1])[:1]]) for _ in range(K)])
            while len(drafted.drafts) < K and drafted._append(rng.choice(_ids(drafted.masks[-1]))):
                pass
            fresh = grammar_of(stop_ids=stop)
            masks = [fresh([*kept, *drafted.drafts[:n]]) for n in range(len(drafted.masks))]
            assert all((one == two).all() for one, two in zip(drafted.masks, masks, strict=True))
            count = rng.randint(0, len(drafted.drafts))
            # the target's own draw comes after what it kept
            kept += [*drafted.drafts[:count], rng.choice(_ids(drafted.masks[count]))]
            if kept[-1] in stop or grammar(kept) is None:
                break


def test_vllm_s_mask_is_that_of_the_next_token_only() -> None:
    grammar = grammar_of()
    grammar.next = np.full(4, 5, np.int32)
    assert (grammar([]) == 5).all()
    assert not np.array_equal(grammar([]), np.full(4, 5, np.int32))


@pytest.mark.parametrize("compiled", [None, ValueError("no grammar")], ids=["not yet", "never"])
def test_without_a_matcher_no_draft_passes(compiled: Any) -> None:
    grammar = Grammar("test", SimpleNamespace(grammar=compiled), None)
    assert grammar([1, 2]) is None
    assert grammar.structured is not None, "no failure of a matcher"
    assert Grammar("test", None, None)([1, 2]) is None


@pytest.mark.parametrize("broken", [{"accept_tokens.return_value": False}, {"fill_bitmask.side_effect": RuntimeError}])
def test_a_matcher_that_fails_is_left_out_and_vllm_s_masks_go_on(broken: dict[str, Any]) -> None:
    matcher = mock.Mock(**{"is_terminated.return_value": False} | broken)
    grammar = Grammar("test", SimpleNamespace(grammar=matcher), mock.Mock())
    assert grammar([1]) is None
    assert grammar.structured is None
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
    grammar = Grammar("test", SimpleNamespace(grammar=Matcher()), SimpleNamespace(backend=backend))
    found = [grammar(ids) is not None for ids in ([], [1], [1, 0], [1, 0, 5], [1, 9], [2], [2, 9, 3])]
    assert found == [True, True, False, False, False, True, True]
    assert grammar.structured is not None, "the matcher has not failed"


@pytest.mark.parametrize("reasoning", [None, object])
def test_a_grammar_is_compiled_unless_only_vllm_knows_where_it_begins(reasoning: Any) -> None:
    compiled, grammars = list[Any](), Grammars(None)
    grammars._manager = SimpleNamespace(reasoner_cls=reasoning, grammar_init=compiled.append)
    grammars.of("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert [request.request_id for request in compiled] == ([] if reasoning else ["a"])
