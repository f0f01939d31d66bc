"""The k of a step: `step_k` is the one place that chooses it. The choice changes the time of a step, never a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from model.strict import shown

TUNING_FILE = "tuning.json"
_MOST_BYTES = 1 << 20


class Batches(NamedTuple):
    """The k of steps of `first` to `last` sequences."""

    first: int
    last: int
    k: int


KOfBatch = tuple[Batches, ...]


def step_k(k_of_batch: KOfBatch, sequences: int) -> int:
    """The most drafts that a step offers each of its sequences, by their number; past the last range, its k."""
    return next((batches.k for batches in k_of_batch if sequences <= batches.last), k_of_batch[-1].k)


def parse_k_of_batch(value: Any, ks: tuple[int, ...], source: str) -> KOfBatch:
    """Ranges [first, last, k], as JSON has them: the first begins at 1, and each begins where the one before it ends.

    UserError, which names their source, for anything else and for a k that is neither 0 nor one of `ks`.
    """
    expected = f"{source} is {shown(value)}; it must be ranges of batch sizes, [[1, 2, 7], [3, 4, 3]] for k 7 up to two"
    if not isinstance(value, list) or not 1 <= len(value) <= 64:
        raise UserError(expected)
    ranges = list[Batches]()
    for row in value:
        if not isinstance(row, list) or len(row) != 3 or any(type(number) is not int for number in row):
            raise UserError(expected)
        batches = Batches(*row)
        first = ranges[-1].last + 1 if ranges else 1
        if batches.first != first or batches.last < first:
            raise UserError(f"{source} has the range {row}; it must begin at {first} and not end before it")
        if batches.k not in (0, *ks):
            raise UserError(f"{source} has k {batches.k}; this bundle's graphs have k {', '.join(map(str, (0, *ks)))}")
        ranges.append(batches)
    return tuple(ranges)


def tuned(bundle: Path, ks: tuple[int, ...]) -> KOfBatch | None:
    """The field k_of_batch of tuning.json beside a bundle's files; None without that file.

    Its other fields say how it was measured, and are ignored. UserError if the file is something else.
    """
    file = bundle / TUNING_FILE
    if not file.exists():
        return None
    # opening a pipe would wait for a writer
    if not file.is_file():
        raise UserError(f"{file} is not a file; remove it or tune again")
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); remove it or tune again") from error
    try:
        value = json.loads(content)["k_of_batch"] if len(content) <= _MOST_BYTES else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} has no k_of_batch ({type(error).__name__}); remove it or tune again") from error
    return parse_k_of_batch(value, ks, f"k_of_batch of {file}")
