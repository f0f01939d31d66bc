"""The training corpus: alternately committed public-domain prose and generated text, as rows of token ids."""

import gzip
import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo.structured import GENERATORS

END = "<|endoftext|>"
TEXT = Path(__file__).parent / "text"
TRAINED_SHARE = 0.95
_PASSAGE_CHARS = (300, 1800)


def load_prose() -> list[list[str]]:
    """Paragraphs of each text, without the last twentieth, which is not trained on."""
    texts = [gzip.decompress(file.read_bytes()).decode() for file in sorted(TEXT.glob("*.txt.gz"))]
    paragraphs = [text.splitlines() for text in texts]
    return [lines[: round(len(lines) * TRAINED_SHARE)] for lines in paragraphs]


def passage(rng: random.Random, prose: list[list[str]]) -> str:
    """A passage from the start of a paragraph, or of a sentence within it."""
    (lines,) = rng.choices(prose, weights=[sum(map(len, lines)) for lines in prose])
    at = rng.randrange(len(lines))
    sentences = re.split(r"(?<=[.!?]) ", lines[at])
    text = " ".join(sentences[rng.randrange(len(sentences)) if rng.random() < 0.5 else 0 :]) + "\n"
    length = rng.randint(*_PASSAGE_CHARS)
    while len(text) < length and at + 1 < len(lines):
        at += 1
        text += lines[at] + "\n"
    return text[: 2 * _PASSAGE_CHARS[1]]


def batches(tokenizer: Tokenizer, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless ids (B, S), rows alternately of structured text and of prose; the end token ends a document."""
    rng, prose, end, number = random.Random(seed), load_prose(), tokenizer.token_to_id(END), 0
    assert end is not None
    while True:
        rows = []
        for _ in range(batch):
            number, row = number + 1, list[int]()
            while len(row) < length:
                (generate,) = rng.choices(list(GENERATORS), weights=list(GENERATORS.values()))
                text = generate(rng) if number % 2 else passage(rng, prose)
                row += [*tokenizer.encode(text).ids, end]
            rows.append(row[:length])
        yield torch.tensor(rows)
