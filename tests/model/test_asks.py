"""Full sampling: penalties, bias, limits of ids, grammars and log-probabilities, by oracles; with any drafts.

In eager graphs; two ranks of a compiled bundle are the second look.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compile.build import build
from model.errors import UserError
from model.filters import Filters
from model.graph_key import Stage
from model.logits_processors import MAX_BIASES
from model.ops import EAGER, iota
from model.sampling import SamplingParams, gumbel_noise, sample
from tests.compile.tiny import spec, write_model
from tests.model.family import DRAFTERS, V, eager_engine
from tests.model.heads import write_head
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import EngineConfig, engine_config
from trnspec.engine.engine import Engine, Proposer
from trnspec.engine.request import Params, Request, Result, check
from trnspec.engine.slots import Slot
from trnspec.runtime.xla import XlaRunner

END, ENDS, KEPT = 7, (7, 20, 33, 46), 24
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
    """The mask of these ids, in order, as vLLM writes it: id 32 w + b is bit b of word w; spare bits are set."""
    spare = [True] * (-len(allowed) % 32)
    bits = np.array([*allowed, *spare], np.uint64).reshape(-1, 32)
    return (bits << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)


def some(count: int, seed: int, share: float = 0.3) -> list[bool]:
    """Random ids that are allowed, at least one."""
    rng = random.Random(seed)
    allowed = [rng.random() < share for _ in range(count)]
    allowed[rng.randrange(count)] = True
    return allowed


def _allowed(seed: int, ids: Sequence[int]) -> list[bool]:
    return some(V, hash((seed, *ids)) & 0xFFFF, 0.6)


def _grammar(seed: int) -> Callable[[Sequence[int]], np.ndarray | None]:
    """Masks that depend on all ids so far; the text ends with one of the ENDS."""
    return lambda ids: None if ids and ids[-1] in ENDS else words(_allowed(seed, ids))


def _requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(prompt, Params(temperature, seed=n, **mix), KEPT, (END,))
        for n, mix in enumerate(MIXES.values())
        for prompt in PROMPTS
    ]


GRAMMARS = [
    Request(prompt, params, KEPT, ENDS, allowed=_grammar(n))
    for n, (prompt, params) in enumerate((prompt, params) for prompt in PROMPTS for params in PARAMS)
]


def _adjusted(logits_V: np.ndarray, request: Request, new: Sequence[int]) -> np.ndarray:
    """vLLM's order and formulas, in fp64 and one id after the other."""
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
    adjusted_V[[*last, *ends, *unlisted]] = -np.inf  # type: ignore[list-item]
    return adjusted_V


def _mostly(requests: Sequence[Request], results: Sequence[Result]) -> Proposer:
    """A host's drafts: a request's own text, of which every fifth id is a different one."""
    texts = {(r.ids, r.params): result.ids for r, result in zip(requests, results, strict=True)}

    def propose(slot: Slot, count: int) -> list[int]:
        text, at = texts.get((slot.request.ids, slot.request.params), []), len(slot.result.ids)
        return [(token + (n % 5 == 4)) % V for n, token in enumerate(text[at : at + count], at)]

    return propose


def _accepted(results: Sequence[Result]) -> tuple[int, int]:
    return sum(sum(r.accepted) for r in results), sum(sum(r.drafted) for r in results)


def test_greedy_ids_are_those_of_the_formulas(family: Path) -> None:
    """Of rows after drafts too: the draft is the target. The control: every mix changes an id."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    engine, requests, changed = eager_engine(family, "itself", batch=8), _requests(), set()
    plain = {p: engine.run([Request(p, Params(), KEPT, (END,))])[0].ids for p in PROMPTS}
    for n, (request, result) in enumerate(zip(requests, engine.run(requests), strict=True)):
        with torch.no_grad():
            logits_NV = theirs(torch.tensor([[*request.ids, *result.ids]])).logits[0, len(request.ids) - 1 : -1].numpy()
        for place, token in enumerate(result.ids):
            adjusted_V = _adjusted(logits_NV[place], request, result.ids[:place])
            assert adjusted_V[token] > adjusted_V.max() - 1e-4, (list(MIXES)[n // 2], place)
        if result.ids != plain[request.ids]:
            changed.add(list(MIXES)[n // 2])
    assert changed == {*MIXES}


def test_ids_under_a_grammar_are_those_of_an_oracle(family: Path) -> None:
    """transformers' logits and the law of a masked sample, one id after the other."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    results = eager_engine(family, "none", batch=8).run(GRAMMARS)
    for seed, (request, result) in enumerate(zip(GRAMMARS, results, strict=True)):
        p, ids = request.params, list[int]()
        filters = Filters(torch.tensor([float(p.top_k)]), torch.tensor([p.top_p]), torch.tensor([p.min_p]))
        seeds = torch.tensor([p.seed_words], dtype=torch.uint32).view(torch.int32)
        params = SamplingParams(torch.tensor([p.temperature]), seeds, filters)
        while len(ids) < request.max_new_tokens and not {*ids[-1:]} & {*ENDS}:
            with torch.no_grad():
                logits_1V = theirs(torch.tensor([[*request.ids, *ids]])).logits[:, -1]
            logits_1V = torch.where(torch.tensor([_allowed(seed, ids)]), logits_1V, float("-inf"))
            noise_1V = gumbel_noise(EAGER, seeds, torch.tensor([len(request.ids) + len(ids)]), iota(V, seeds))
            ids.append(int(sample(EAGER, logits_1V, params, noise_1V)))
        assert result.ids == ids
    assert {r.reason for r in results} == {"eos", "length"}


@pytest.mark.parametrize("drafter", WITH_DRAFTS)
def test_ids_do_not_depend_on_drafts_or_company(family: Path, drafter: str) -> None:
    """Greedy, sampled and under grammars; any limit of drafts, slots that others have used, neighbours without any."""
    every = [*_requests()[:: 1 + 2 * (drafter != "chain")], *_requests(0.9)[::3], *GRAMMARS]
    requests = [dataclasses.replace(r, logprobs=0 if n % 3 else None) for n, r in enumerate(every)]
    target, engine = eager_engine(family, "none", batch=8), eager_engine(family, drafter, batch=8)
    alone = target.run(requests)
    if drafter == "ngram":
        engine.propose = _mostly(requests, alone)
    free = [Request((5, 6, n), Params(0.8 * (n % 2), seed=n), 20) for n in range(len(requests))]
    limited = [dataclasses.replace(r, k_limit=(None, 0, 2, 1)[n % 4]) for n, r in enumerate(requests)]
    mixed = engine.run([r for pair in zip(limited, free, strict=True) for r in pair])
    for results in (engine.run(requests), mixed[::2]):
        assert [(r.ids, r.reason) for r in results] == [(r.ids, r.reason) for r in alone]
        accepted, drafted = _accepted(results)
        assert 0 < accepted < drafted + (drafter == "itself")
        for one, other in zip(results, alone, strict=True):
            assert [s.logprob for s in one.scores] == pytest.approx([s.logprob for s in other.scores], abs=1e-5)
    assert [r.ids for r in mixed[1::2]] == [r.ids for r in target.run(free)]


def test_a_draft_is_adjusted_as_its_row_is(family: Path) -> None:
    """A draft that is the target itself is always right, also where an id of the same step counts."""
    mixes = ("presence", "frequency", "repetition", "bias")
    requests = [Request(prompt, Params(**MIXES[mix]), 40) for mix in mixes for prompt in PROMPTS]
    results = eager_engine(family, "itself", batch=8).run(requests)
    assert all(result.accepted == result.drafted for result in results)
    assert all(max(Counter(result.ids).values()) > 1 for result in results[:2])


@pytest.mark.parametrize("drafter", ["chain", "parallel", "eagle3", "dspark", "ngram"])
def test_halves_emit_and_accept_what_the_fused_step_does(family: Path, drafter: str) -> None:
    """With log-probabilities, which need full sampling, and without: steps, drafts offered and accepted, reasons."""
    prompts = [(9, 2, 7), (1, 2, 3, 1, 2, 3, 1, 2), tuple(range(1, 60)) * 2]
    requests = [Request(p, params, 16, k_limit=1 if params.seed == 11 else None) for p in prompts for params in PARAMS]
    found, stages = [], []
    for logprobs in (None, 0):
        engine = eager_engine(family, drafter, k=3, batch=8)
        engine.runner.keys.clear()  # type: ignore[attr-defined]
        results = engine.run([dataclasses.replace(request, logprobs=logprobs) for request in requests])
        # a full-sampling step of fewer drafts than the largest k runs the graph of that k
        found.append([dataclasses.replace(result, scores=[], steps_of_k={}) for result in results])
        stages.append({key.stage for key in engine.runner.keys if not key.is_prefill})  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert 0 < _accepted(found[0])[0] < _accepted(found[0])[1]
    assert stages[0] == {Stage.STEP}
    assert drafter == "ngram" or {Stage.DRAFT, Stage.VERIFY} <= stages[1]


@pytest.mark.parametrize("drafter", ["chain", "eagle3", "ngram"])
def test_a_text_that_masks_force_takes_every_draft(family: Path, drafter: str) -> None:
    text = [(11 * n) % 50 + 8 for n in range(21)]

    def allowed(ids: Sequence[int]) -> np.ndarray:
        return words([i == text[len(ids) % 21] for i in range(V)])

    (result,) = eager_engine(family, drafter, k=3).run([Request((3, 4), PARAMS[1], 21, allowed=allowed)])
    # the prompt's graph samples the first, five steps four each
    assert (result.ids, result.steps, result.accepted) == (text, 5, [5, 5, 5])


def test_logprobs_of_a_prompt_are_the_model_s(family: Path) -> None:
    """A prompt of several blocks of rows: log-probabilities, ranks and the best ids of every id but the first."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    engine = eager_engine(family, "none", max_len=256, chunks=(128,))
    for length in (1, 2, 31, 250):
        ids = tuple((7 * n * n + 3 * n) % V for n in range(length))
        asked = Request(ids, Params(presence_penalty=1.0, allowed_token_ids=(3, 4)), 2, logprobs=0, prompt_logprobs=5)
        (result,) = engine.run([asked])
        every = torch.tensor([[*ids, *result.ids]])
        with torch.no_grad():
            logprobs = theirs(every).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, every[0, 1:, None])
        scores = [*result.prompt_scores, *result.scores]
        torch.testing.assert_close(torch.tensor([s.logprob for s in scores]), own[:, 0], atol=3e-4, rtol=0)
        assert [s.rank for s in scores] == (logprobs >= own).sum(-1).tolist()
        assert [[i for i, _ in s.best] for s in result.prompt_scores] == logprobs[: length - 1].topk(5).indices.tolist()
        assert all(s.best == () for s in result.scores)


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "eagle"), [("reference", False), ("nki", True)])
def test_two_ranks_sample_mask_and_score_as_one_does(tmp_path: Path, kernels: str, eagle: bool) -> None:
    """Counts of the ids of a rank's logits, and of a head's own ids; a rank's 40 ids begin within a mask's word."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 80, "eos_token_id": None}
    write_model(tmp_path / "target", 1, 0.2, **sizes)
    write_model(tmp_path / "draft", 1, 0.2, num_hidden_layers=1, **sizes)
    if eagle:
        write_head(tmp_path / "head", tmp_path / "target", taps=(0, 1), **{n: s for n, s in sizes.items() if s})
    penalties: dict[str, Any] = {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {70: 1.0}}
    asked = [Request((3, 5, 7), Params(0.9 * n, seed=4, **penalties), 5, logprobs=4, prompt_logprobs=3) for n in (0, 1)]
    asked += [
        Request((3, 5, 7), p, 3, allowed=lambda ids: words(some(80, len(ids), 0.2)), logprobs=2)
        for p in (Params(), Params(1.2, top_k=9, top_p=0.8, seed=2))
    ]
    found = []
    for name, tp in (("reference", 1), (kernels, 2)):
        draft = str(tmp_path / ("head" if eagle else "draft"))
        bundle = read_bundle(build(spec(tmp_path, f"{name}{tp}", kernels=name, tp=tp, k=1, draft=draft)))
        found.append(Engine(XlaRunner(bundle), engine_config(bundle)).run(asked))
    for one, two in zip(*found, strict=True):
        assert one.ids == two.ids
        for mine, other in zip((*one.prompt_scores, *one.scores), (*two.prompt_scores, *two.scores), strict=True):
            assert (mine.rank, [i for i, _ in mine.best]) == (other.rank, [i for i, _ in other.best])
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert all(some(80, n, 0.2)[token] for one in found[0][2:] for n, token in enumerate(one.ids))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"params": Params(presence_penalty=2.5)}, r"presence-penalty is 2.5; it must be a number in \[-2, 2\]"),
    ({"params": Params(frequency_penalty=float("nan"))}, "frequency-penalty is nan"),
    ({"params": Params(repetition_penalty=0.0)}, "repetition-penalty is 0.0"),
    ({"params": Params(logit_bias={1: 101.0})}, "logit-bias of 1 is 101.0"),
    ({"params": Params(logit_bias={64: 1.0})}, "logit-bias holds the id 64; this bundle's ids are 0 to 63"),
    ({"params": Params(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))}, "logit-bias has 513 ids"),
    ({"params": Params(allowed_token_ids=(1, -1))}, "allowed-token-ids holds the id -1"),
    ({"params": Params(bad_words=((3,), ()))}, "bad-words holds an empty one"),
    ({"params": Params(min_tokens=9)}, "min-tokens is 9, above max-new-tokens 8"),
    ({"logprobs": 21}, "logprobs is 21; it must be a count of at most 20"),
    ({"prompt_logprobs": -1}, "prompt-logprobs is -1"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said[:24] for _, said in REFUSED])
def test_requests_that_no_graph_serves_are_refused(changes: dict[str, Any], said: str) -> None:
    vocab = MAX_BIASES + 1 if "513" in said else V
    config = EngineConfig((3,), 2, 128, (128,), vocab, 3, ((128, 128),))
    check(config, Request((1,), Params(min_tokens=8, bad_words=((3, 4),), logit_bias={63: 100.0}), 8, logprobs=20))
    with pytest.raises(UserError, match=said):
        check(config, Request((1,), **{"max_new_tokens": 8} | changes))
