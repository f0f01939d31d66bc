"""Incremental detokenization, stop strings, and a tokenizer that fails."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.errors import UserError
from trnspec.bundle.tokenizer import TOKENIZER
from trnspec.engine.text import Detokenizer, encode, ids_of_words, load_tokenizer

TEXT = "Zähle: 1, 2, 3, 😀 drei, vier — 5, 6. Ende, 1, 2 und 😀😀, fertig."


def _bytes() -> Tokenizer:
    """A token for each byte: characters of several are unfinished in between."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = _bytes()
IDS = encode(BYTES, TEXT)


def test_the_text_is_that_of_all_tokens_without_unfinished_characters() -> None:
    tokens = Detokenizer(BYTES)
    for count in range(1, len(IDS) + 1):
        assert tokens(IDS[:count]) is None
        text = BYTES.decode(list(IDS[:count]))
        assert tokens.text == text.rstrip("\ufffd")
        assert tokens.ends[-1] == len(tokens.text) + text.endswith("\ufffd")
    assert tokens.text == TEXT


def test_each_token_is_decoded_once() -> None:
    """Twice the tokens take about twice the time, not four times."""
    decoded = 0

    class Counting:
        def decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return BYTES.decode(ids)

    counting: Any = Counting()
    stops = Detokenizer(counting, ("nowhere",), 0)
    for count in range(1, len(IDS) + 1):
        assert stops(IDS[:count]) is None
    assert decoded < 12 * len(IDS)


def _cut(stops: tuple[str, ...], min_tokens: int = 0, step: int = 1) -> int | None:
    cut = Detokenizer(BYTES, stops, min_tokens)
    return next((cut_at for n in range(1, len(IDS) + 1, step) if (cut_at := cut(IDS[:n])) is not None), None)


@pytest.mark.parametrize("step", [1, 5])
def test_a_stop_string_cuts_before_it_wherever_it_is(step: int) -> None:
    rng = random.Random(1)
    for _ in range(60):
        begin = rng.randrange(len(TEXT) - 6)
        stops = tuple(TEXT[b : b + rng.randint(1, 5)] for b in (begin, rng.randrange(len(TEXT) - 6)))
        end = min(TEXT.index(stop) + len(stop) for stop in stops)
        first = min(TEXT.index(stop) for stop in stops if stop in TEXT[:end])
        assert _cut(stops, step=step) == len(TEXT[:first].encode())


def test_of_two_stop_strings_in_one_token_the_first_place_counts() -> None:
    assert _cut(("2", ", 2")) == _cut((", 2", "2")) == len(TEXT[: TEXT.index(", 2")].encode())


@pytest.mark.parametrize("min_tokens", [0, 1, 9, 10, 30])
def test_a_stop_string_before_min_tokens_is_no_end_and_the_next_one_is(min_tokens: int) -> None:
    """As vLLM: the first occurrence that ends after so many tokens."""
    raw = TEXT.encode()
    at = next(n for n in range(len(raw)) if raw[n : n + 1] == b"," and n + 1 > min_tokens)
    assert _cut((",",), min_tokens) == at
    assert _cut((", 2",), len(raw)) is None


def test_deltas_join_to_the_emitted_text_and_show_no_stop_string() -> None:
    rng = random.Random(2)
    for _ in range(60):
        begin = rng.randrange(len(TEXT) - 6)
        stop = TEXT[begin : begin + rng.randint(1, 5)]
        tokens, shown = Detokenizer(BYTES, (stop,)), ""
        for count in range(1, len(IDS) + 1):
            if (cut_at := tokens(IDS[:count])) is not None:
                break
            shown += tokens.delta()
        assert cut_at is not None
        text = BYTES.decode(list(IDS[:cut_at]))
        assert text.startswith(shown)
        assert shown + tokens.rest(text) == text == TEXT[: TEXT.index(stop)]


def test_a_bundle_s_tokenizer_is_checked_and_pads_nothing() -> None:
    padded, files = _bytes(), {TOKENIZER: b""}
    padded.enable_padding(length=10**4)
    files[TOKENIZER] = padded.to_str().encode()
    sizes = SimpleNamespace(target_config=SimpleNamespace(vocab_size=256))
    bundle: Any = SimpleNamespace(files=files, read=files.__getitem__, path="demo", spec=sizes)
    assert encode(load_tokenizer(bundle), "ab") == encode(BYTES, "ab")
    sizes.target_config.vocab_size = 255
    with pytest.raises(UserError, match=r"^demo: .*json has the id 255, .* are 0 to 254; build the bundle again"):
        load_tokenizer(bundle)
    files.clear()
    with pytest.raises(UserError, match=r"^demo has no .*json; build it from a checkpoint folder with its tokenizer"):
        load_tokenizer(bundle)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="a stop string is empty"):
        Detokenizer(BYTES, ("a", ""), 0)


def test_bad_words_count_at_the_beginning_and_after_a_blank() -> None:
    assert ids_of_words(BYTES, ["ab", (5, 6)]) == (encode(BYTES, "ab"), (5, 6))
    words = Tokenizer(models.WordLevel({"x": 0, "ab": 1, " ab": 2}, unk_token="x"))
    assert ids_of_words(words, ["ab"]) == ids_of_words(words, [" ab"]) == ((1,), (2,))


class _Panic(BaseException):
    """What pyo3 raises for a panic of Rust code: no Exception."""


_Panic.__name__ = "PanicException"


def test_a_panic_of_the_library_is_a_sentence_and_an_interrupt_is_not() -> None:
    class Failing:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode(self, *_: Any, **__: Any) -> None:
            raise self.error

    for error in (_Panic("called `Result::unwrap()`"), Exception("bad regex")):
        failing: Any = Failing(error)
        with pytest.raises(UserError, match=r"the tokenizers library failed \((called|bad regex)"):
            encode(failing, "zzz")
    interrupted: Any = Failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        encode(interrupted, "zzz")
