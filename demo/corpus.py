"""The training text: committed public-domain prose and generated text, as rows of ids."""

import gzip
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo import structured, structured_code

END = "<|endoftext|>"
TEXT = Path(__file__).parent / "text"
GENERATORS = structured.GENERATORS | structured_code.GENERATORS
HELD_OUT_SHARE = 0.05
PASSAGE_CHARS = (300, 1800)


@dataclass(frozen=True)
class Prose:
    """Open text by paragraph: the trained part, the held-out part, and its common words."""

    train: tuple[tuple[str, ...], ...]
    held_out: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    sha256: str


def load_prose() -> Prose:
    """Read demo/text/*.txt.gz; the last twentieth of each text is held out."""
    texts = [gzip.decompress(file.read_bytes()).decode() for file in sorted(TEXT.glob("*.txt.gz"))]
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
    seen = Counter(re.findall(r"\b[a-z]{2,10}\b", " ".join(texts)))
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


def documents(prose: Prose, entropy: str, rng: random.Random, held_out: bool = False) -> Iterator[str]:
    """Endless documents, open or structured; the held-out prose never meets the trained one."""
    while True:
        if entropy == "open":
            yield open_document(rng, prose.held_out if held_out else prose.train)
        else:
            (generator,) = rng.choices(list(GENERATORS), weights=list(GENERATORS.values()))
            yield generator(rng, prose.words)


def end_id(tokenizer: Tokenizer) -> int:
    """The id that ends a document."""
    end = tokenizer.token_to_id(END)
    assert end is not None
    return end


def rows(
    prose: Prose, entropy: str, tokenizer: Tokenizer, length: int, seed: int, held_out: bool = False
) -> Iterator[list[int]]:
    """Rows of `length` ids: each starts with a document, documents end with the end id."""
    stream = documents(prose, entropy, random.Random(f"{seed}-{entropy}-{held_out}"), held_out)
    while True:
        row: list[int] = []
        while len(row) < length:
            row += [*tokenizer.encode(next(stream)).ids, end_id(tokenizer)]
        yield row[:length]


def batches(
    prose: Prose, tokenizer: Tokenizer, shape: tuple[int, int], seed: int, open_rows: int = 1
) -> Iterator[torch.Tensor]:
    """Endless ids of a shape [B, S]: a structured row, then so many open ones, in turn."""
    structured, unstructured = (rows(prose, entropy, tokenizer, shape[1], seed) for entropy in ("structured", "open"))
    stream = (next(source) for source in itertools.cycle([structured, *[unstructured] * open_rows]))
    while True:
        yield torch.tensor(list(itertools.islice(stream, shape[0])))
