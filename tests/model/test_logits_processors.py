"""Full sampling against oracles: penalties, bias, allowed ids, grammars and log-probabilities, with each drafter.

Home: eager graphs; second look: two ranks of a compiled bundle.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model.approx_filters import ApproxFilters
from model.filters import Filters
from model.graph_key import Stage
from model.ops import EAGER, iota
from model.sampling import SamplingParams, gumbel_noise, sample
from tests.compile.tiny import spec, write_model
from tests.model.family import DRAFTERS, AsTheyRun, V, eager_engine, untraced
from tests.model.heads import write_head
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result

END, ENDS, TOKENS = 7, (7, 20, 33, 46), 24
WITH_DRAFTS = [name for name in DRAFTERS if name != "none"]
MIXES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.6},
    "rewards": {"presence_penalty": -1.5, "frequency_penalty": -0.5, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0, 63: 2.5, 0: 1.0}},
    "listed": {"allowed_token_ids": tuple(range(3, 60, 4))},
    "words": {"bad_words": (*((n,) for n in range(20)), *((n, n) for n in range(V)), (29, 24), (9, 27, 9))},
    "ends later": {"min_tokens": 9, "logit_bias": {END: 4.0}},
    "all": {
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {11: 2.0, END: 3.0},
        "allowed_token_ids": tuple(range(2, 64)), "bad_words": ((13,), (56, 33)), "min_tokens": 5,
    },
}  # fmt: skip
PROMPTS = [(9, 2, 7), (32, 29, 32, 29, 24, 5)]
# greedy, sampled, filtered
PARAMS = [Params(), Params(0.9, seed=11), Params(1.2, 20, 0.9, 0.02, 2**63 + 5)]


def words(allowed: Sequence[bool]) -> np.ndarray:
    """The bit mask of vLLM: id 32 w + b is bit b of word w; bits after the last id are set."""
    spare = [True] * (-len(allowed) % 32)
    bits = np.array([*allowed, *spare], np.uint64).reshape(-1, 32)
    return (bits << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)


def some(count: int, seed: int, share: float = 0.3) -> list[bool]:
    """A random mask with at least one allowed id."""
    rng = random.Random(seed)
    allowed = [rng.random() < share for _ in range(count)]
    allowed[rng.randrange(count)] = True
    return allowed


def _allowed(seed: int, ids: Sequence[int]) -> list[bool]:
    return some(V, hash((seed, *ids)) & 0xFFFF, 0.6)


def _grammar(seed: int) -> Callable[[Sequence[int]], np.ndarray | None]:
    """Masks that depend on all ids of the output, which ends with one of the ENDS."""
    return lambda ids: None if ids and ids[-1] in ENDS else words(_allowed(seed, ids))


def _every_other(ids: Sequence[int]) -> np.ndarray:
    """A grammar without an end: half of the ids after each id."""
    return words([(n + len(ids)) % 2 == 0 for n in range(V)])


def _requests(temperature: float = 0.0) -> list[Request]:
    """All mixes with each prompt; the last mix also has a grammar."""
    mixes = [(n, mix, _every_other if name == "all" else None) for n, (name, mix) in enumerate(MIXES.items())]
    return [
        Request(prompt, Params(temperature, seed=n, **mix), TOKENS, (END,), allowed=grammar)
        for n, mix, grammar in mixes
        for prompt in PROMPTS
    ]


GRAMMARS = [
    Request(prompt, params, TOKENS, ENDS, allowed=_grammar(n))
    for n, (prompt, params) in enumerate((prompt, params) for prompt in PROMPTS for params in PARAMS)
]


def _adjusted(logits_V: np.ndarray, request: Request, new: Sequence[int]) -> np.ndarray:
    """vLLM's formulas in vLLM's order, in fp64."""
    p, adjusted_V = request.params, logits_V.astype(np.float64)
    for token, bias in p.logit_bias.items():
        adjusted_V[token] += bias
    for token in {*request.ids, *new}:
        adjusted_V[token] *= 1 / p.repetition_penalty if adjusted_V[token] > 0 else p.repetition_penalty
    for token, count in Counter(new).items():
        adjusted_V[token] -= p.frequency_penalty * count + p.presence_penalty
    last = [w[-1] for w in p.bad_words if tuple(new)[len(new) + 1 - len(w) :] == tuple(w[:-1])]
    ends = request.stop_ids if len(new) < p.min_tokens else ()
    unlisted = [i for i in range(V) if p.allowed_token_ids and i not in p.allowed_token_ids]
    unlisted += range(1 - len(new) % 2, V, 2) if request.allowed else ()
    adjusted_V[[*last, *ends, *unlisted]] = -np.inf  # type: ignore[list-item]
    return adjusted_V


def _mostly(requests: Sequence[Request], results: Sequence[Result]) -> Callable[[Sequence[int], int], list[int]]:
    """Host-side drafts: the next ids of a request's known output, with every fifth id changed."""
    texts = [(*request.ids, *result.ids) for request, result in zip(requests, results, strict=True)]

    def propose(ids: Sequence[int], count: int) -> list[int]:
        at, text = len(ids), next((text for text in texts if text[: len(ids)] == ids), ())
        return [(token + (n % 5 == 4)) % V for n, token in enumerate(text[at : at + count], at)]

    return propose


def _accepted(results: Sequence[Result]) -> tuple[int, int]:
    return sum(sum(r.accepted) for r in results), sum(sum(r.drafted) for r in results)


def test_greedy_ids_are_those_of_the_formulas(family: Path) -> None:
    """Also rows after drafts, whose counts include drafts of the same step: the target drafts for itself.

    Negative control: each mix changes an id.
    """
    hf = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    engine, requests, changed, accepted = eager_engine(family, "itself", batch=8), _requests(), set(), 0
    plain = {p: engine.run([Request(p, Params(), TOKENS, (END,))])[0].ids for p in PROMPTS}
    for n, (request, result) in enumerate(zip(requests, engine.run(requests), strict=True)):
        mix = list(MIXES)[n // 2]
        with torch.no_grad():
            logits_NV = hf(torch.tensor([[*request.ids, *result.ids]])).logits[0, len(request.ids) - 1 : -1].numpy()
        for place, token in enumerate(result.ids):
            adjusted_V = _adjusted(logits_NV[place], request, result.ids[:place])
            assert adjusted_V[token] > adjusted_V.max() - 1e-4, (mix, place)
        if result.ids != plain[request.ids]:
            changed.add(mix)
        if mix in ("presence", "frequency", "repetition", "bias") and result.finish_reason == "length":
            assert result.accepted == result.drafted
            accepted += max(Counter(result.ids).values()) > 1
    assert changed == {*MIXES}
    assert accepted > 3


def test_ids_under_a_grammar_are_those_of_an_oracle(family: Path) -> None:
    """Samples one id after the other from transformers' masked logits."""
    hf = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    results = eager_engine(family, "none", batch=8).run(GRAMMARS)
    for seed, (request, result) in enumerate(zip(GRAMMARS, results, strict=True)):
        p, ids = request.params, list[int]()
        filters = Filters(torch.tensor([float(p.top_k)]), torch.tensor([p.top_p]), torch.tensor([p.min_p]))
        seeds = torch.tensor([p.seed_words], dtype=torch.uint32).view(torch.int32)
        params = SamplingParams(torch.tensor([p.temperature]), seeds, filters)
        while len(ids) < request.max_new_tokens and not {*ids[-1:]} & {*ENDS}:
            with torch.no_grad():
                logits_1V = hf(torch.tensor([[*request.ids, *ids]])).logits[:, -1]
            logits_1V = torch.where(torch.tensor([_allowed(seed, ids)]), logits_1V, float("-inf"))
            noise_1V = gumbel_noise(EAGER, seeds, torch.tensor([len(request.ids) + len(ids)]), iota(V, seeds))
            ids.append(int(sample(EAGER, logits_1V, params, noise_1V)))
        assert result.ids == ids
    assert {r.finish_reason for r in results} == {"eos", "length"}


@pytest.fixture(scope="module")
def without_drafts(family: Path) -> tuple[list[tuple[Request, Result]], list[tuple[Request, Result]]]:
    """Requests with full sampling, as many without, and their results without speculation."""
    every = [*GRAMMARS, *_requests(), *_requests(0.9)[::3]]
    requests = [dataclasses.replace(r, logprobs=0 if n % 4 else None) for n, r in enumerate(every)]
    free = [Request((5, 6, n), Params(0.8 * (n % 2), seed=n), 20) for n in range(len(requests))]
    engine = eager_engine(family, "none", batch=8)
    return [*zip(requests, engine.run(requests), strict=True)], [*zip(free, engine.run(free), strict=True)]


@pytest.mark.parametrize("drafter", WITH_DRAFTS)
def test_ids_do_not_depend_on_drafts_or_neighbours(family: Path, drafter: str, without_drafts: Any) -> None:
    """Different k limits, reused slots, mixed with plain requests; each drafter has a third of the mixes."""
    first, grammars = WITH_DRAFTS.index(drafter) % 3, len(GRAMMARS)
    pairs = ([*of[:grammars], *of[grammars + first :: 3]] for of in without_drafts)
    (requests, expected), (free, free_expected) = (zip(*of, strict=True) for of in pairs)
    engine = eager_engine(family, drafter, batch=8)
    if drafter == "ngram":
        engine.propose = _mostly(requests, expected)
    limited = [dataclasses.replace(r, k_limit=(None, 0, 2, 1)[n % 4]) for n, r in enumerate(requests)]
    mixed = engine.run([r for pair in zip(limited, free, strict=True) for r in pair])
    for results in (engine.run(requests), mixed[::2]):
        assert [(r.ids, r.finish_reason) for r in results] == [(r.ids, r.finish_reason) for r in expected]
        accepted, drafted = _accepted(results)
        assert 0 < accepted < drafted + (drafter == "itself")
        for one, other in zip(results, expected, strict=True):
            assert [s.logprob for s in one.scores] == pytest.approx([s.logprob for s in other.scores], abs=1e-5)
    assert [r.ids for r in mixed[1::2]] == [r.ids for r in free_expected]


@pytest.mark.parametrize("drafter", ["chain", "parallel", "eagle3", "dspark", "ngram"])
def test_halves_emit_and_accept_what_the_fused_step_does(family: Path, drafter: str) -> None:
    """Equal results without full sampling, with log-probabilities, and with masks that allow all ids."""
    prompts, every_id = [(9, 2, 7), (1, 2, 3, 1, 2, 3, 1, 2), tuple(range(1, 60)) * 2], words([True] * V)
    requests = [Request(p, params, 16, k_limit=1 if params.seed == 11 else None) for p in prompts for params in PARAMS]
    actual, stages, kinds = [], [], list[dict[str, Any]]([{}, {"logprobs": 0}, {"allowed": lambda ids: every_id}])
    for kind in kinds:
        engine = eager_engine(family, drafter, k=3, batch=8)
        engine.runner.keys.clear()  # type: ignore[attr-defined]
        with mock.patch.object(ApproxFilters, "keep", autospec=True, side_effect=ApproxFilters.keep) as keep:
            results = engine.run([dataclasses.replace(request, **kind) for request in requests])
        assert keep.called == (drafter != "ngram"), "drafts have approximate filters"
        actual.append([dataclasses.replace(result, scores=[]) for result in results])
        stages.append({key.stage for key in engine.runner.keys if not key.is_prefill})  # type: ignore[attr-defined]
    assert actual[0] == actual[1] == actual[2]
    assert 0 < _accepted(actual[0])[0] < _accepted(actual[0])[1]
    assert stages[0] == {Stage.STEP}
    assert drafter == "ngram" or {Stage.DRAFT, Stage.VERIFY} <= stages[1] & stages[2]


def test_logprobs_of_a_prompt_are_the_model_s(family: Path) -> None:
    """Log-probabilities, ranks and best ids of all ids but the first; prompts of up to several blocks of rows."""
    hf = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    engine = eager_engine(family, "none", max_len=256, chunks=(128,))
    for length in (1, 2, 31, 250):
        ids = tuple((7 * n * n + 3 * n) % V for n in range(length))
        params = Params(presence_penalty=1.0, allowed_token_ids=(3, 4))
        (result,) = engine.run([Request(ids, params, 2, logprobs=0, prompt_logprobs=5)])
        every = torch.tensor([[*ids, *result.ids]])
        with torch.no_grad():
            logprobs = hf(every).logits[0, :-1].log_softmax(-1)
        of_ids = logprobs.gather(1, every[0, 1:, None])
        scores = [*result.prompt_scores, *result.scores]
        torch.testing.assert_close(torch.tensor([s.logprob for s in scores]), of_ids[:, 0], atol=3e-4, rtol=0)
        assert [s.rank for s in scores] == (logprobs >= of_ids).sum(-1).tolist()
        assert [[i for i, _ in s.best] for s in result.prompt_scores] == logprobs[: length - 1].topk(5).indices.tolist()
        assert all(s.best == () for s in result.scores)


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "draft"), [("reference", "draft"), ("nki", "head")])
def test_two_ranks_sample_mask_and_score_as_one_does(tmp_path: Path, kernels: str, draft: str) -> None:
    """Counts for a rank's ids and for a head's draft ids; rank 1's 40 ids begin within a word of the mask."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 80}
    target = write_model(tmp_path / "target", 1, 0.2, **sizes, eos_token_id=None)
    write_model(tmp_path / "draft", 1, 0.2, **sizes, eos_token_id=None, num_hidden_layers=1)
    write_head(tmp_path / "head", target, taps=(0, 1), **sizes)
    penalties: dict[str, Any] = {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {70: 1.0}}
    kinds: list[dict[str, Any]] = [
        *({"params": Params(t, seed=4, **penalties), "logprobs": 4, "prompt_logprobs": 3} for t in (0.0, 0.9)),
        *(
            {"params": p, "logprobs": 2, "allowed": lambda ids: words(some(80, len(ids), 0.2))}
            for p in (Params(), Params(1.2, top_k=9, top_p=0.8, seed=2))
        ),
    ]
    actual = []
    for name, tp in (("reference", 1), (kernels, 2)):
        plan = spec(tmp_path, f"{name}{tp}", kernels=name, tp=tp, k=1, draft=str(tmp_path / draft))
        runner = AsTheyRun(read_bundle(untraced(plan)))
        requests = [Request((3, 5, 7), max_new_tokens=4, **kind) for kind in kinds]
        actual.append(Engine(runner, engine_config(runner.bundle)).run(requests))
    for one, two in zip(*actual, strict=True):
        assert one.ids == two.ids
        for mine, other in zip((*one.prompt_scores, *one.scores), (*two.prompt_scores, *two.scores), strict=True):
            assert (mine.rank, [i for i, _ in mine.best]) == (other.rank, [i for i, _ in other.best])
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert all(some(80, n, 0.2)[token] for one in actual[0][2:] for n, token in enumerate(one.ids))
