"""The training text: committed public-domain prose and generated text, as rows of ids."""

import gzip
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from demo import structured, structured_code

TEXT = Path(__file__).parent / "text"
GENERATORS = structured.GENERATORS | structured_code.GENERATORS
HELD_OUT_SHARE = 0.05
PASSAGE_CHARS = (300, 1800)


@dataclass(frozen=True)
class Prose:
    """Open text by paragraph: what is trained on, what is held out, and its common words."""

    train: tuple[tuple[str, ...], ...]
    held_out: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    sha256: str


def load_prose(folder: Path = TEXT) -> Prose:
    """Read demo/text/*.txt.gz; the last twentieth of each text is held out."""
    files = sorted(folder.glob("*.txt.gz"))
    texts = [gzip.decompress(file.read_bytes()).decode() for file in files]
    paragraphs = [text.splitlines() for text in texts]
    cuts = [round(len(lines) * (1 - HELD_OUT_SHARE)) for lines in paragraphs]
    pairs = list(zip(paragraphs, cuts, strict=True))
    return Prose(
        train=tuple(tuple(lines[:cut]) for lines, cut in pairs),
        held_out=tuple(tuple(lines[cut:]) for lines, cut in pairs),
        words=_common_words(texts),
        sha256=hashlib.sha256("".join(texts).encode()).hexdigest(),
    )


def _common_words(texts: list[str], count: int = 3000) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    for word in re.findall(r"\b[a-z]{2,10}\b", " ".join(texts)):
        seen[word] = seen.get(word, 0) + 1
    return tuple(sorted(seen, key=lambda word: (-seen[word], word))[:count])


def open_document(rng: random.Random, texts: tuple[tuple[str, ...], ...]) -> str:
    """A passage of one text, from a paragraph start or from a sentence start within it."""
    (lines,) = rng.choices(texts, weights=[sum(map(len, lines)) for lines in texts])
    at = rng.randrange(len(lines))
    sentences = re.split(r"(?<=[.!?]) ", lines[at])
    first = rng.randrange(len(sentences)) if rng.random() < 0.5 else 0
    passage, wanted = " ".join(sentences[first:]) + "\n", rng.randint(*PASSAGE_CHARS)
    while len(passage) < wanted and at + 1 < len(lines):
        at += 1
        passage += lines[at] + "\n"
    return passage[: 2 * PASSAGE_CHARS[1]]


def structured_document(rng: random.Random, words: tuple[str, ...]) -> str:
    """One document of one of the generators, chosen by weight."""
    (generator,) = rng.choices(list(GENERATORS), weights=list(GENERATORS.values()))
    return generator(rng, words)


@dataclass(frozen=True)
class Source:
    """Documents of one entropy class, as an endless stream from a seeded generator."""

    prose: Prose
    entropy: str
    held_out: bool = False

    def documents(self, rng: random.Random) -> Iterator[str]:
        """Endless documents; the held-out prose never meets the trained one."""
        texts = self.prose.held_out if self.held_out else self.prose.train
        while True:
            if self.entropy == "open":
                yield open_document(rng, texts)
            else:
                yield structured_document(rng, self.prose.words)


def rows(source: Source, tokenizer: Tokenizer, length: int, seed: int) -> Iterator[list[int]]:
    """Rows of `length` ids: each starts with a document, documents end with the end id."""
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None
    documents = source.documents(random.Random(f"{seed}-{source.entropy}-{source.held_out}"))
    while True:
        row: list[int] = []
        while len(row) < length:
            row += [*tokenizer.encode(next(documents)).ids, end]
        yield row[:length]


def mixed_rows(prose: Prose, tokenizer: Tokenizer, length: int, seed: int) -> Iterator[list[int]]:
    """Training rows, a structured one and an open one in turn."""
    both = [rows(Source(prose, e), tokenizer, length, seed) for e in ("structured", "open")]
    while True:
        for stream in both:
            yield next(stream)
