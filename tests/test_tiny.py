"""The project in one file: build, generate, token identity, errors of a prompt and of an option."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compile.tiny import write_pair
from trnspec import LLM, BuildSpec, Params, UserError, build, verify

PROMPTS = [(5, 9, 2, 7), (8, 1), (3, 3, 4)]
SAMPLED = Params(temperature=0.8, seed=7)
MASKED = Params(temperature=0.8, seed=7, bad_words=((5,),))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair of two and one layers, 3 drafts a step, two sequences at a time."""
    folder = tmp_path_factory.mktemp("tiny")
    target, draft = write_pair(folder)
    sizes = {"tp": 1, "k": "3", "batch": 2, "max_len": 128, "dtype": "fp32", "kernels": "reference"}
    return build(BuildSpec(target=target, draft=draft, out=str(folder / "out"), **sizes))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        # compiled here, so that no test waits for it
        for params in (Params(), MASKED):
            opened.generate(PROMPTS, params, max_new_tokens=12)
            opened.generate(PROMPTS, params, max_new_tokens=12, speculation=False)
        yield opened


def test_a_build_can_be_verified(bundle: Path) -> None:
    assert verify(bundle) == []


def test_it_generates(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], SAMPLED, max_new_tokens=12)
    assert (len(output.ids), output.finish_reason) == (12, "length")
    assert "".join(llm.stream(PROMPTS[0], SAMPLED, max_new_tokens=12)) == output.text


@pytest.mark.parametrize("params", [Params(), SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(llm: LLM, params: Params) -> None:
    both = [llm.generate(PROMPTS, params, max_new_tokens=12, speculation=way) for way in (True, False)]
    assert [o.ids for o in both[0]] == [o.ids for o in both[1]]
    assert {o.tokens_per_step for o in both[1]} == {1.0} != {o.tokens_per_step for o in both[0]}


def test_what_cannot_be_served_is_refused_in_a_sentence(llm: LLM) -> None:
    with pytest.raises(UserError, match="the prompt has 128 tokens, the largest bucket is 128"):
        llm.generate([5] * 128)


def test_a_prompt_without_allowed_tokens_ends_with_an_error(llm: LLM) -> None:
    """In a list only its output has the error; a single prompt raises it."""
    impossible = Params(allowed_token_ids=(4,), bad_words=((4, 4),))
    outputs = llm.generate(PROMPTS, [MASKED, impossible, MASKED], max_new_tokens=12)
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert (outputs[1].ids, outputs[0].error) == ([4], "")
    assert outputs[0].ids == llm.generate(PROMPTS[0], MASKED, max_new_tokens=12).ids
    with pytest.raises(UserError, match="limits exclude every token, after 1 new tokens; look for"):
        llm.generate(PROMPTS[1], impossible, max_new_tokens=12)


def test_a_request_s_time_excludes_a_paused_stream(llm: LLM) -> None:
    short, long = (
        llm.generate(PROMPTS[:2], SAMPLED, max_new_tokens=12),
        llm.generate([PROMPTS[0]] * 2, max_new_tokens=60),
    )
    assert all(0 < o.seconds < 60 for o in (*short, *long))
    stream = llm.stream(PROMPTS[0], SAMPLED, max_new_tokens=40)
    next(stream)
    begin = time.perf_counter()
    during = llm.generate(PROMPTS[1], SAMPLED, max_new_tokens=2)
    assert during.seconds <= time.perf_counter() - begin
    stream.close()


def test_unknown_platforms_and_options(bundle: Path, llm: LLM) -> None:
    with pytest.raises(UserError, match="platform is 'gpu'; it must be auto, cpu, neuron or pjrt"):
        LLM(bundle, "gpu")
    with pytest.raises(UserError, match="does not have a NEFF for each graph"):
        LLM(bundle, platform="neuron")
    with pytest.raises(TypeError, match="tokens"):
        llm.generate(PROMPTS[0], tokens=3)
