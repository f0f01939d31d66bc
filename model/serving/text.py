"""Text at the edges: the bundle's tokenizer, prompts from files, stop strings, streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from model.errors import UserError


def load_tokenizer(bundle: Path) -> Tokenizer:
    """The tokenizer of a bundle."""
    file = bundle / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{file} is missing; build the bundle from a checkpoint folder with its tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise UserError(f"{file} cannot be read ({error}); build the bundle again") from error


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
    return text


def stop_cut(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[Sequence[int]], int | None] | None:
    """A function from new ids to how many to keep once a stop string stands in their text.

    The kept ids are the longest run whose text ends before the stop string.
    """
    if not stops:
        return None

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


class Stream:
    """Prints text as ids come; an unfinished character waits for its other bytes."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> None:
        """Show what the new ids add, up to the last whole character."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids).rstrip("\ufffd")
        self._write(text[self._shown :])
        self._shown = max(self._shown, len(text))
