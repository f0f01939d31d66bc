"""Text and tokens: the bundle's tokenizer, incremental detokenization, stop strings, bad words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from model.errors import UserError
from trnspec.bundle.opening import Bundle

TOKENIZER = "tokenizer/tokenizer.json"
# what decodes to it may be the beginning of a character
_REPLACEMENT = "\ufffd"


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of a bundle. Raises UserError if there is none, or the library or the model cannot use it."""
    if TOKENIZER not in bundle.files:
        raise UserError(f"{bundle.path} has no {TOKENIZER}; build it from a checkpoint folder with its tokenizer")
    content = bundle.read(TOKENIZER)
    if clause := tokenizer_fault(content, bundle.spec.target_config.vocab_size):
        raise UserError(f"{bundle.path}: {TOKENIZER} {clause}; build the bundle again")
    return Tokenizer.from_str(content.decode("utf-8"))


def tokenizer_fault(content: bytes | bytearray, vocab_size: int) -> str:
    """Why a tokenizer.json cannot be used with a model of this size, as the end of a sentence; "" if it can."""
    try:
        tokenizer = _call(Tokenizer.from_str, content.decode("utf-8", errors="replace"))
        last = max(_call(tokenizer.get_vocab, with_added_tokens=True).values())
    except UserError as error:
        return f"cannot be used: {error}"
    return "" if last < vocab_size else f"has the id {last}, the model's ids are 0 to {vocab_size - 1}"


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> tuple[int, ...]:
    """The token ids of a text. Raises UserError if the tokenizer fails on it."""
    return tuple(_call(tokenizer.encode, text, add_special_tokens=special).ids)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of the tokenizers library; its errors, panics of its Rust code included, become a UserError."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizers library failed ({ascii(str(error)[:120])[1:-1]})") from error


class Detokenizer:
    """The text of tokens as they come, without an unfinished character; each token is decoded with the few before it.

    `ends`: the length of the text after each token, one more where a character is unfinished.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        # tokens from `_first` on are decoded together; those before `_next` are in the text
        self._first = self._next = 0
        self.text, self.ends = "", list[int]()

    def append(self, token: int) -> None:
        """Add a token."""
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._first : self._next])
        text = self._tokenizer.decode(self._ids[self._first :])
        finished = not text.endswith(_REPLACEMENT)
        if finished and len(text) > len(known):
            self.text += text[len(known) :]
            self._first, self._next = self._next, len(self._ids)
        self.ends.append(len(self.text) + (not finished))

    def kept(self, length: int) -> int:
        """The most tokens whose text has at most this length."""
        count = len(self.ends)
        while count and self.ends[count - 1] > length:
            count -= 1
        return count


class StopStrings:
    """Ends a request at the first stop string that ends after its `min_tokens`, as in vLLM: see `Request.cut`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        if not all(stops):
            raise UserError("a stop string is empty; give at least one character, or leave it out")
        self._tokens, self._stops, self._min_tokens = Detokenizer(tokenizer), stops, min_tokens

    def __call__(self, ids: Sequence[int]) -> int | None:
        """The tokens to keep of all new ones, whose text ends before the stop string; None to go on."""
        tokens = self._tokens
        for token in ids[len(tokens.ends) :]:
            before = len(tokens.text)
            tokens.append(token)
            places = [tokens.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            if len(tokens.ends) > self._min_tokens and max(places) >= 0:
                return tokens.kept(min(place for place in places if place >= 0))
        return None


class Pieces:
    """Text as tokens come, in pieces that join to the text of the tokens that are kept in the end.

    A token in which a stop string may begin waits for the next ones.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokens, self._stops, self._shown = Detokenizer(tokenizer), stops, 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain with these new tokens."""
        tokens, begin = self._tokens, self._shown
        for token in ids:
            tokens.append(token)
        text = tokens.text
        open_stops = [len(text) - n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])]
        count = tokens.kept(min(open_stops, default=len(text)))
        self._shown = max(begin, min(tokens.ends[count - 1], len(text)) if count else 0)
        return text[begin : self._shown]

    def end(self, text: str) -> str:
        """The rest of the text of all kept tokens."""
        return text[self._shown :]


def ids_of_words(tokenizer: Tokenizer, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ids of bad words: of a text both at the beginning and after a blank.

    As in vLLM (update_from_tokenizer of vllm/sampling_params.py): the ids after a blank count if they are as many and
    begin differently.
    """
    found = list[Sequence[int]]()
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        first, inner = (encode(tokenizer, blank + word.lstrip(), special=False) for blank in ("", " "))
        found.append(first)
        if len(inner) == len(first) and inner[:1] != first[:1]:
            found.append(inner)
    return tuple(map(tuple, found))
