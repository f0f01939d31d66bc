"""`trnspec.LLM`: one prompt, many, streams, ids, seeds, limits, memory, refusals."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from model.errors import UserError
from tests.model.demo_bundle import PROMPTS
from trnspec.engine.request import Params
from trnspec.llm import LLM

# one bundle of the demo pair, compiled with what requests need; small ones are in tests/test_tiny.py
pytestmark = pytest.mark.slow
SAMPLED = Params(temperature=0.8, seed=7)
COUNT = "Count from 1 to 10:"
FEW = {"max_new_tokens": 16}


def test_a_restart_gives_the_same_ids(tiny: Path) -> None:
    """In a new process, without speculation."""
    params = Params(1.1, top_k=30, seed=5)
    with LLM(tiny) as llm:
        drafts = llm.generate(COUNT, params, **FEW)
    assert len(set(drafts.ids)) > 4
    command = [sys.executable, "-m", "model.generate", "--bundle", str(tiny), "--prompt", COUNT, "--json"]
    command += ["--temperature", "1.1", "--top-k", "30", "--seed", "5", "--max-new-tokens", "16", "--no-speculation"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ids"] == drafts.ids


def test_ids_in_and_out(llm: LLM) -> None:
    ids = llm.tokenizer.encode(COUNT).ids
    as_text, as_ids = llm.generate(COUNT, SAMPLED, **FEW), llm.generate(ids, SAMPLED, **FEW)
    assert as_ids.ids == as_text.ids
    assert [o.ids for o in llm.generate([ids, COUNT], SAMPLED, **FEW)] == [as_text.ids] * 2
    assert llm.tokenizer.decode(as_ids.ids) == as_ids.text
    # the same text in two parts: the noise of a token depends on its position
    rest = llm.generate((*ids, *as_ids.ids[:10]), SAMPLED, max_new_tokens=6)
    assert [*as_ids.ids[:10], *rest.ids] == as_ids.ids


def test_a_stop_string_is_never_shown_even_in_part(llm: LLM) -> None:
    """Every place of a text as the stop string: it may begin in one step and end in a later one."""
    text = llm.generate(PROMPTS[12], max_new_tokens=40).text
    for at in range(1, len(text) - 4, 3):
        stop = text[at : at + 4]
        stream = llm.stream(PROMPTS[12], max_new_tokens=40, stop=stop)
        shown, output = "".join(stream), stream.output
        assert output
        assert (shown, output.finish_reason) == (output.text, "stop")
        assert stop not in shown
        assert text.startswith(shown)


def test_streams_and_prompts_without_speculation_are_served_together(llm: LLM) -> None:
    expected = [llm.generate(p, SAMPLED, **FEW).text for p in PROMPTS[:3]]
    streams, texts = [llm.stream(p, SAMPLED, **FEW) for p in PROMPTS[:2]], ["", "", ""]
    for step, deltas in enumerate(itertools.zip_longest(*streams, fillvalue="")):
        texts[:2] = [text + delta for text, delta in zip(texts[:2], deltas, strict=True)]
        if step == 1:
            third = llm.generate(PROMPTS[2], SAMPLED, **FEW, speculation=False)
            texts[2] = third.text
    assert texts == expected
    assert sum(third.accepted) == 0


def test_its_end_frees_the_memory(bundle: Path) -> None:
    client = jax.devices("cpu")[0].client

    def memory() -> tuple[int, int]:
        gc.collect()
        return sum(a.nbytes for a in client.live_buffers()), len(client.live_executables())

    before = memory()
    with LLM(bundle) as llm:
        llm.generate(COUNT, **FEW)
        stream = llm.stream(COUNT)
        next(stream)
        bytes_open, executables_open = memory()
    assert bytes_open > before[0] + 10_000_000
    assert executables_open > before[1]
    for use in (lambda: next(stream), lambda: llm.generate(COUNT)):
        with pytest.raises(UserError, match=r"closed|not loaded"):
            use()
    del use
    assert memory() == before
    llm.load()
    assert len(llm.generate(COUNT, **FEW).ids) == 16
    llm.close()


REFUSED: dict[str, Callable[[LLM], object]] = {
    "the prompt is empty": lambda llm: llm.generate(""),
    "the id 2048; this bundle's ids are 0 to 2047": lambda llm: llm.stream([5, 2048]),
    "k-limit is 8; this bundle drafts 0 to 7": lambda llm: llm.generate(COUNT, k_limit=8),
    "2 Params came for 3 prompts": lambda llm: llm.generate([COUNT] * 3, [SAMPLED] * 2),
    "2 Params came for one prompt": lambda llm: llm.generate(COUNT, [SAMPLED] * 2),
    "has no manifest.json": lambda llm: LLM(llm.bundle.path / "hlo"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_refused_and_why(llm: LLM, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        REFUSED[sentence](llm)
    assert len(llm.generate(COUNT, max_new_tokens=2).ids) == 2
