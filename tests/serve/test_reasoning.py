"""Thinking, then a grammar: with vLLM's scheduler and manager, ids are those without drafts and the grammar holds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.machine import V
from tests.serve.server import NO_VLLM
from trnspec.engine.masks import allows, mask_of

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager

from serve.grammar import Grammar
from serve.platform import BundlePlatform
from tests.serve import test_grammar, test_vllm
from tests.serve.test_vllm import Client

__all__ = ["bundle"]
bundle = test_vllm.bundle
# ids that end the thinking: one token in 16; prompts hold CLOSED if their template has closed it
ENDS, CLOSED = range(3, V, 16), 2


class Reasoner:
    """vLLM's rule of parsers with an id for the end; several ids are ends here."""

    def __init__(self, tokenizer: Any) -> None: ...

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return CLOSED in input_ids

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return any(token in ENDS for token in delta_ids)


class Matcher(test_grammar.Matcher):
    """Allows some ids after each output."""

    def is_terminated(self) -> bool:
        return False

    def accept_tokens(self, name: str, ids: list[int]) -> bool:
        refused = [token for n, token in enumerate(ids) if not allows(allowed([*self.ids, *ids[:n]]), token)]
        return not refused and super().accept_tokens(name, ids)

    def fill_bitmask(self, words: torch.Tensor, row: int) -> None:
        words[row] = torch.from_numpy(allowed(self.ids))


def allowed(ids: Sequence[int]) -> Any:
    return mask_of(random.Random(str(list(ids))).sample(range(V), 12), V)


def manager(config: Any) -> Any:
    made: Any = StructuredOutputManager(config)
    words = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros((rows, V // 32), dtype=torch.int32))
    made.reasoner_cls, made.backend = Reasoner, words
    return made


def joined(steps: list[list[int]]) -> list[int]:
    return [token for step in steps for token in step]


def requests(seeds: range) -> Iterator[tuple[list[int], Any]]:
    for seed in seeds:
        rng = random.Random(seed)
        ids = [*([CLOSED] if seed % 8 == 0 else []), *(rng.randrange(4, V) for _ in range(rng.choice((5, 100, 140))))]
        grammar = StructuredOutputsParams(regex="a")
        yield ids, SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=grammar)


def serve(bundle: Any, seeds: range, **options: Any) -> list[list[list[int]]]:
    """The ids of each seed's answer, step by step."""
    config = test_vllm._vllm_config(**options)
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = 9
    BundlePlatform.check_and_update_config(config)
    bundle.runner = test_vllm._runner()
    with pytest.MonkeyPatch.context() as patch:
        worker = test_vllm._worker(bundle, config, patch)
        patch.setattr("serve.scheduler.Grammar", Grammar)
        client = Client(worker, manager(config))
        for n, (ids, params) in enumerate(requests(seeds)):
            client.add(str(n), ids, params)
            grammar: Future[Any] = Future()
            grammar.set_result(Matcher())
            client.scheduler.requests[str(n)].structured_output_request.grammar = grammar
        while client.scheduler.has_requests():
            client.step()
    assert all(str(outputs[-1].finish_reason) == "length" for outputs in client.outputs.values())
    return [[one.new_token_ids for one in client.outputs[str(n)]] for n in range(len(seeds))]


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_drafts_while_thinking_change_no_id_and_no_id_escapes_the_grammar(bundle: Any, count: int) -> None:
    drafted, undrafted = (serve(bundle, range(count), **options) for options in ({"k": 3}, {"speculation": False}))
    lengths = list[int]()
    for (prompt, _), steps, ids in zip(requests(range(count)), drafted, map(joined, undrafted), strict=True):
        assert joined(steps) == ids
        thought = next((n + 1 for n, token in enumerate(ids) if token in ENDS), len(ids))
        begin = 0 if CLOSED in prompt else thought
        assert all(allows(allowed(ids[begin:n]), ids[n]) for n in range(begin, len(ids)))
        # the first token is the prefill's
        lengths += [len(step) for n, step in enumerate(steps) if n and len(joined(steps[:n])) < begin]
    assert sum(lengths) > 1.6 * len(lengths), "drafts are accepted before the grammar begins"
