"""Text and tokens: the bundle's tokenizer, incremental detokenization, stop strings, bad words."""

from bisect import bisect_right
from collections.abc import Sequence

from tokenizers import Tokenizer

from model.errors import UserError
from trnspec.bundle.opening import Bundle
from trnspec.bundle.tokenizer import TOKENIZER, call, tokenizer_fault

# what decodes to it may be the beginning of a character
_REPLACEMENT = "\ufffd"


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of a bundle. Raises UserError if there is none, or the library or the model cannot use it."""
    if TOKENIZER not in bundle.files:
        raise UserError(f"{bundle.path} has no {TOKENIZER}; build it from a checkpoint folder with its tokenizer")
    content = bundle.read(TOKENIZER)
    if clause := tokenizer_fault(content, bundle.spec.target_config.vocab_size):
        raise UserError(f"{bundle.path}: {TOKENIZER} {clause}; build the bundle again")
    tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    # no request is padded, and a length beyond the memory would end the process
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> tuple[int, ...]:
    """The token ids of a text. Raises UserError if the tokenizer fails on it."""
    return tuple(call(tokenizer.encode, text, add_special_tokens=special).ids)


class Detokenizer:
    """Decodes a request's tokens incrementally; each token is decoded twice, the second time with the next one.

    As `Request.cut` it ends the request at the first stop string that ends after `min_tokens` tokens, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        if not all(stops):
            raise UserError("a stop string is empty; give at least one character, or leave it out")
        self._tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._ids, self._shown = list[int](), 0
        # tokens from `_first` on are decoded together; those before `_next` are in `self.text`
        self._first = self._next = 0
        # without an unfinished character; its length after each token, one more where a character is unfinished
        self.text, self.ends = "", list[int]()

    def __call__(self, ids: Sequence[int]) -> int | None:
        """The number of new tokens before a stop string; None if there is no stop string."""
        for token in ids[len(self._ids) :]:
            before = len(self.text)
            self._append(token)
            places = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            if len(self._ids) > self._min_tokens and max(places, default=-1) >= 0:
                return bisect_right(self.ends, min(place for place in places if place >= 0))
        return None

    def delta(self) -> str:
        """New text since the last call, without tokens in which a stop string may begin."""
        text, begin = self.text, self._shown
        open_stops = [len(text) - n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])]
        count = bisect_right(self.ends, min(open_stops, default=len(text)))
        self._shown = max(begin, min(self.ends[count - 1], len(text)) if count else 0)
        return text[begin : self._shown]

    def rest(self, text: str) -> str:
        """The rest of the output, given as a string."""
        return text[self._shown :]

    def _append(self, token: int) -> None:
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._first : self._next])
        text = self._tokenizer.decode(self._ids[self._first :])
        finished = not text.endswith(_REPLACEMENT)
        if finished and len(text) > len(known):
            self.text += text[len(known) :]
            self._first, self._next = self._next, len(self._ids)
        self.ends.append(len(self.text) + (not finished))


def ids_of_words(tokenizer: Tokenizer, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ids of bad words: of a text both at the beginning and after a blank.

    As in vLLM (update_from_tokenizer of vllm/sampling_params.py): the ids after a blank count if they are as many and
    begin differently.
    """
    ids = list[Sequence[int]]()
    for word in words:
        if not isinstance(word, str):
            ids.append(word)
            continue
        first, inner = (encode(tokenizer, blank + word.lstrip(), special=False) for blank in ("", " "))
        ids.append(first)
        if len(inner) == len(first) and inner[:1] != first[:1]:
            ids.append(inner)
    return tuple(map(tuple, ids))
