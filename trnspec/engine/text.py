"""Text at the edges: the bundle's tokenizer, prompts from files, stop strings, streaming."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from model.errors import UserError
from trnspec.bundle.opening import Bundle

TOKENIZER = "tokenizer/tokenizer.json"
_TRIAL_SECONDS = 20
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, ({_TRIAL_SECONDS}, {_TRIAL_SECONDS}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode("utf-8"))
ids = tokenizer.encode("Count from 1 to 10: \u00e9 \U0001f600\\n").ids
tokenizer.decode(ids + [0])
print(max(tokenizer.get_vocab(with_added_tokens=True).values()))
"""


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of a bundle; UserError if there is none, or the library cannot use it."""
    if TOKENIZER not in bundle.files:
        raise UserError(f"{bundle.path} has no {TOKENIZER}; build it from a checkpoint folder with its tokenizer")
    content = bundle.read(TOKENIZER)
    if clause := tokenizer_fault(content, bundle.spec.target_config.vocab_size):
        raise UserError(f"{bundle.path}: {TOKENIZER} {clause}; build the bundle again")
    return Tokenizer.from_str(content.decode("utf-8"))


def tokenizer_fault(content: bytes | bytearray, vocabulary: int) -> str:
    """Why a tokenizer.json cannot be used with a model of this vocabulary, as the end of a sentence; "" if it can.

    The library ends its process on some files, or takes all memory: a process with limits of its own tries them.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRIAL], input=content, capture_output=True, timeout=_TRIAL_SECONDS * 2, check=False
        )
    except subprocess.TimeoutExpired:
        return f"takes the tokenizers library more than {_TRIAL_SECONDS * 2} s"
    if tried.returncode == 0:
        last = int(tried.stdout)
        return "" if last < vocabulary else f"has the id {last}, the model's ids are 0 to {vocabulary - 1}"
    said = tried.stderr.decode(errors="replace").strip().splitlines()
    return f"cannot be used by the tokenizers library ({ascii(said[-1][:120])[1:-1] if said else tried.returncode})"


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt from the command line or from a UTF-8 file."""
    if (text is None) == (file is None):
        raise UserError("give exactly one of --prompt and --prompt-file")
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error
    if not text:
        raise UserError("the prompt is empty; give at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 (character {error.start}); give it in UTF-8") from error
    return text


def stop_cut(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[Sequence[int]], int | None] | None:
    """A function from new ids to how many to keep once a stop string is in their text; UserError for an empty one.

    The kept ids are the longest run whose text ends before the stop string.
    """
    if not stops:
        return None
    if not all(stops):
        raise UserError("a stop string is empty; give at least one character, or leave it out")

    def cut(ids: Sequence[int]) -> int | None:
        text = tokenizer.decode(list(ids))
        found = [text.index(s) for s in stops if s in text]
        if not found:
            return None
        kept = len(ids)
        while kept and len(tokenizer.decode(list(ids[:kept]))) > min(found):
            kept -= 1
        return kept

    return cut


class Pieces:
    """Text as ids come, in pieces that join to the text of the ids that are kept in the end.

    An unfinished character waits for its other bytes; an id in which a stop string may begin waits for the next ids.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that the new ids add for certain."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids).rstrip("\ufffd")
        if self._stops:
            text = self._before(_safe_length(text, self._stops))
        piece = text[self._shown :]
        self._shown += len(piece)
        return piece

    def end(self, text: str) -> str:
        """The rest of the text of all kept ids, not shown yet."""
        return text[self._shown :]

    def _before(self, length: int) -> str:
        # whole ids, as `stop_cut` keeps them
        kept = len(self._ids)
        while kept and len(text := self._tokenizer.decode(self._ids[:kept])) > length:
            kept -= 1
        return text if kept else ""


def _safe_length(text: str, stops: Sequence[str]) -> int:
    """The length of the text that no stop string can take back, whatever comes after it."""
    begun = [len(text) - n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return min(begun, default=len(text))


def ids_of_words(tokenizer: Tokenizer, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ids of words that must not occur, at the text's beginning and, behind a blank, inside of it.

    As vLLM has them (update_from_tokenizer of vllm/sampling_params.py): the ids behind a blank count as the same word
    if they are as many and begin differently.
    """
    found = list[Sequence[int]]()
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        alone, behind = (tokenizer.encode(blank + word.lstrip(), add_special_tokens=False).ids for blank in ("", " "))
        found.append(alone)
        if len(behind) == len(alone) and behind[:1] != alone[:1]:
            found.append(behind)
    return tuple(map(tuple, found))
