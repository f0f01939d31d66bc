"""Penalties, bias, limits of ids and scores: an oracle in fp64; the same ids with any drafts and company."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compile.build import build
from compile.doctor import findings
from model.asks import BIASES
from model.errors import UserError
from tests.compile.tiny import spec, write_model
from tests.model.family import DRAFTERS, V, graphs, some_graphs
from tests.model.heads import write_head
from tests.model.test_masked_drafts import _mostly
from tests.model.test_masks import some, words
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.masks import limited, mask_of
from trnspec.engine.request import Params, Request, Result, Shape, check
from trnspec.llm import LLM
from trnspec.runtime.xla import XlaRunner

END = 7
# every drafter, and a chain on two ranks
CASES: list[tuple[str, dict[str, int]]] = [(name, {}) for name in DRAFTERS if name != "none"] + [("chain", {"tp": 2})]
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
KEPT = 24


def _requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(prompt, Params(temperature, seed=n, **mix), KEPT, (END,))
        for n, mix in enumerate(MIXES.values())
        for prompt in PROMPTS
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


def _run(loaded: XlaRunner, requests: Sequence[Request], speculative: bool = True, **more: Any) -> list[Result]:
    return Engine(loaded, engine_config(loaded.bundle), speculative, **more).run(requests)


def test_greedy_ids_are_those_of_the_formulas(family: Path) -> None:
    """Of rows behind drafts too: the draft is the target. The control: every mix changes an id."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    loaded, requests = graphs(family, "itself"), _requests()
    plain = {p: _run(loaded, [Request(p, Params(), KEPT, (END,))])[0].ids for p in PROMPTS}
    changed = set()
    for n, (request, result) in enumerate(zip(requests, _run(loaded, requests), strict=True)):
        with torch.no_grad():
            logits_NV = theirs(torch.tensor([[*request.ids, *result.ids]])).logits[0, len(request.ids) - 1 : -1].numpy()
        for place, token in enumerate(result.ids):
            adjusted_V = _adjusted(logits_NV[place], request, result.ids[:place])
            assert adjusted_V[token] > adjusted_V.max() - 1e-4, (list(MIXES)[n // 2], place)
        if result.ids != plain[request.ids]:
            changed.add(list(MIXES)[n // 2])
    assert changed == {*MIXES}


@pytest.mark.parametrize(("drafter", "changes"), CASES, ids=str)
def test_ids_do_not_depend_on_drafts_or_company(family: Path, drafter: str, changes: dict[str, int]) -> None:
    """Greedy and drawn; alone, any limit of drafts, slots that others have used, neighbours that ask nothing."""
    loaded = some_graphs(family, drafter, **changes)
    requests = _requests() + [dataclasses.replace(r, logprobs=0) for r in _requests(0.9)]
    alone = [_run(loaded, [request], speculative=False)[0] for request in requests]
    propose = _mostly(requests, alone) if drafter == "ngram" else None
    limited_ones = [dataclasses.replace(r, k_limit=(None, 0, 2, 1)[n % 4]) for n, r in enumerate(requests)]
    free = [Request((5, 6, n), Params(0.8 * (n % 2), seed=n), 30) for n in range(len(requests))]
    undisturbed = _run(loaded, free, speculative=False)
    mixed = _run(loaded, [r for pair in zip(limited_ones, free, strict=True) for r in pair], propose=propose)
    for results in (_run(loaded, requests, propose=propose), mixed[::2]):
        assert [(r.ids, r.reason) for r in results] == [(r.ids, r.reason) for r in alone]
        assert sum(sum(r.accepted) for r in results) > 0
    assert [r.ids for r in mixed[1::2]] == [r.ids for r in undisturbed]


def test_a_draft_is_adjusted_as_its_row_is(family: Path) -> None:
    """A draft that is the target itself is always right, also where an id of the same step counts."""
    mixes = ("presence", "frequency", "repetition", "bias")
    requests = [Request(prompt, Params(**MIXES[mix]), 40) for mix in mixes for prompt in PROMPTS]
    results = _run(graphs(family, "itself"), requests)
    assert all(result.accepted == result.drafted for result in results)
    assert all(max(Counter(result.ids).values()) > 1 for result in results[:2])


@pytest.mark.parametrize(("kernels", "eagle"), [("reference", False), ("nki", False), ("nki", True)])
def test_two_ranks_draw_mask_and_score_as_one_does(tmp_path: Path, kernels: str, eagle: bool) -> None:
    """Counts of the ids of a rank's logits, and of a head's own ids; the bits of its own half of a mask.

    A rank's 40 ids begin within a mask's word.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 80, "eos_token_id": None}
    write_model(tmp_path / "target", 1, 0.2, **sizes)
    write_model(tmp_path / "draft", 1, 0.2, num_hidden_layers=1, **sizes)
    if eagle:
        of_head = {name: size for name, size in sizes.items() if size}
        write_head(tmp_path / "head", tmp_path / "target", taps=(0, 1), **of_head)
    draft = str(tmp_path / ("head" if eagle else "draft"))
    penalties: dict[str, Any] = {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {70: 1.0}}
    params = [Params(0.9 * n, seed=4, **penalties) for n in range(2)]
    asked = [Request((3, 5, 7), p, 5, logprobs=4, prompt_logprobs=3) for p in params]
    asked += [
        Request((3, 5, 7), p, 3, allowed=lambda ids: words(some(80, len(ids), 0.2)), logprobs=2)
        for p in (Params(), Params(1.2, top_k=9, top_p=0.8, seed=2))
    ]
    found = []
    for name, tp in (("reference", 1), (kernels, 2)):
        bundle = read_bundle(build(spec(tmp_path, f"{name}{tp}", kernels=name, tp=tp, k=1, draft=draft)))
        assert findings(bundle) == []
        found.append(_run(XlaRunner(bundle), asked))
    for one, two in zip(*found, strict=True):
        assert one.ids == two.ids
        for mine, other in zip((*one.prompt_scores, *one.scores), (*two.prompt_scores, *two.scores), strict=True):
            assert (mine.rank, [i for i, _ in mine.best]) == (other.rank, [i for i, _ in other.best])
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert all(some(80, n, 0.2)[token] for one in found[0][2:] for n, token in enumerate(one.ids))


def test_scores_of_a_prompt_are_the_model_s(family: Path) -> None:
    """A prompt of several blocks of rows: log-probabilities, ranks and the best ids of every id but the first."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    loaded = some_graphs(family, "none", max_len=256)
    for length in (1, 2, 31, 250):
        ids = tuple((7 * n * n + 3 * n) % V for n in range(length))
        asked = Request(ids, Params(presence_penalty=1.0, allowed_token_ids=(3, 4)), 2, logprobs=0, prompt_logprobs=5)
        (result,) = _run(loaded, [asked])
        whole = torch.tensor([[*ids, *result.ids]])
        with torch.no_grad():
            logprobs = theirs(whole).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, whole[0, 1:, None])
        scores = [*result.prompt_scores, *result.scores]
        torch.testing.assert_close(torch.tensor([s.logprob for s in scores]), own[:, 0], atol=3e-4, rtol=0)
        assert [s.rank for s in scores] == (logprobs >= own).sum(-1).tolist()
        assert [[i for i, _ in s.best] for s in result.prompt_scores] == logprobs[: length - 1].topk(5).indices.tolist()
        assert all(s.best == () for s in result.scores)


def test_limits_of_ids_become_masks() -> None:
    def ids(ids: Sequence[int], params: Params, **more: Any) -> set[int]:
        allowed = limited(Request((1,), params, **more), 40)
        assert allowed is not None
        mask = allowed(ids)
        assert mask is not None
        return {i for i in range(64) if mask[i // 32] >> i % 32 & 1}

    every = set(range(40))
    assert limited(Request((1,), Params(presence_penalty=1.0)), 40) is None
    assert ids([], Params(allowed_token_ids=(3, 39))) == {3, 39}
    words = Params(bad_words=((5,), (7, 8), (7, 8, 9)))
    assert ids([], words) == every - {5}
    assert ids([7], words) == every - {5, 8}
    assert ids([7, 8], words) == every - {5, 9}
    assert ids([8], words) == every - {5}
    late = Params(min_tokens=2)
    assert [ids([1] * n, late, stop_ids=(4,)) for n in range(3)] == [every - {4}, every - {4}, every]
    assert ids([], late, stop_ids=(4,), ends=(6,)) == every - {6}
    # a grammar that knows nothing but an end is not contradicted
    end = mask_of((4,), 40)
    assert ids([], late, stop_ids=(4,), allowed=lambda ids: end) == {4}
    assert limited(Request((1,), late, stop_ids=(4,), allowed=lambda ids: None), 40)([]) is None  # type: ignore[misc]


def test_the_front_door_takes_words_and_gives_scores(family: Path) -> None:
    with LLM(graphs(family).bundle.path) as llm:
        plain = llm.generate([9, 2, 7], max_new_tokens=6)
        bad = llm.generate([9, 2, 7], Params(bad_words=(f"w{plain.ids[0]}",)), max_new_tokens=6, logprobs=2)
        assert plain.ids[0] not in bad.ids
        assert bad.scores[0].best[0][0] == plain.ids[0], "log-probabilities are the model's own"
        assert [len(s.best) for s in bad.scores] == [2] * 6
        assert len(llm.generate([9, 2, 7], max_new_tokens=1, prompt_logprobs=1).prompt_scores) == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"params": Params(presence_penalty=2.5)}, r"presence-penalty is 2.5; it must be a number in \[-2, 2\]"),
    ({"params": Params(frequency_penalty=float("nan"))}, "frequency-penalty is nan"),
    ({"params": Params(repetition_penalty=0.0)}, "repetition-penalty is 0.0"),
    ({"params": Params(logit_bias={1: 101.0})}, "logit-bias of 1 is 101.0"),
    ({"params": Params(logit_bias={64: 1.0})}, "logit-bias holds the id 64; this bundle's ids are 0 to 63"),
    ({"params": Params(logit_bias=dict.fromkeys(range(BIASES + 1), 1.0))}, "logit-bias has 513 ids"),
    ({"params": Params(allowed_token_ids=(1, -1))}, "allowed-token-ids holds the id -1"),
    ({"params": Params(bad_words=((3,), ()))}, "bad-words holds an empty one"),
    ({"params": Params(bad_words=((3, 64),))}, "bad-words holds the id 64"),
    ({"params": Params(min_tokens=-1)}, "min-tokens is -1"),
    ({"params": Params(min_tokens=9)}, "min-tokens is 9, above max-new-tokens 8"),
    ({"logprobs": 21}, "logprobs is 21; it must be a count of at most 20"),
    ({"prompt_logprobs": -1}, "prompt-logprobs is -1"),
    ({"logprobs": True}, "logprobs is True"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said[:24] for _, said in REFUSED])
def test_requests_that_no_graph_serves_are_refused(changes: dict[str, Any], said: str) -> None:
    shape = Shape((3,), 2, 128, (128,), V, 3)
    check(shape, Request((1,), Params(min_tokens=8, bad_words=((3, 4),), logit_bias={63: 100.0}), 8, logprobs=20))
    with pytest.raises(UserError, match=said):
        check(shape, Request((1,), **{"max_new_tokens": 8} | changes))
