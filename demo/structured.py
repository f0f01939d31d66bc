"""Seeded generators of structured text: repetition, counting, lists and tables."""

import calendar
import random
import string
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path

Generator = Callable[[random.Random, Sequence[str]], str]
# most repetition uses these fixed lines and cycles, so that the models know them
LINES = (Path(__file__).parent / "text/lines.txt").read_text().splitlines()
CYCLES = [tuple(cycle.split()) for cycle in (
    "red green blue", "one two three four", "yes no", "tick tock", "north east south west",
    "spring summer autumn winter", "do re mi fa sol la ti", "ha", "left right", "a b c", "0 1", "foo bar baz",
)]  # fmt: skip
KNOWN_SHARE = 0.85
FEW, MANY = (3, 4, 5, 6, 8, 10, 12), (20, 30, 40, 50, 100)
REPEAT_REQUESTS = (
    "Repeat the following line exactly {n} times: {line}\n",
    "Repeat this line {n} times: {line}\n",
    "Write the line below {n} times.\n{line}\n\n",
    "Say it {n} times: {line}\n",
)
WEEK, MONTHS = tuple(calendar.day_name), tuple(calendar.month_name)[1:]


def _times(rng: random.Random) -> int:
    return rng.choice(MANY if rng.random() < 0.3 else FEW)


def _line(rng: random.Random, words: Sequence[str]) -> str:
    if rng.random() < KNOWN_SHARE:
        return rng.choice(LINES)
    line = " ".join(rng.choice(words[:1000]) for _ in range(rng.randint(2, 6)))
    line = line.capitalize() if rng.random() < 0.4 else line
    return line + rng.choice(("", ".", ".", "!"))


def repeated_line(rng: random.Random, words: Sequence[str]) -> str:
    """An instruction to repeat a line, then the line that many times."""
    line, n = _line(rng, words), _times(rng)
    return rng.choice(REPEAT_REQUESTS).format(n=n, line=line) + (line + "\n") * n


def repeated_cycle(rng: random.Random, words: Sequence[str]) -> str:
    """A short cycle of words, again and again, without an instruction."""
    known = rng.random() < KNOWN_SHARE
    drawn = tuple(rng.choice(words[:1000]) for _ in range(rng.randint(2, 5)))
    cycle = rng.choice(CYCLES) if known else drawn
    separator = rng.choice((" ", ", ", "\n", " - "))
    return separator.join(cycle * _times(rng)) + "\n"


def repeated_stanza(rng: random.Random, words: Sequence[str]) -> str:
    """A few lines repeated as a block, as in a refrain."""
    stanza = "".join(_line(rng, words) + "\n" for _ in range(rng.randint(2, 4)))
    head = rng.choice(("", "Sing the chorus again and again:\n\n"))
    return head + (stanza + "\n") * rng.choice(FEW)


def _span(rng: random.Random) -> tuple[int, int]:
    first = rng.choice((0, 1, 1, 1, 1, 1, rng.randint(2, 99)))
    return first, first + rng.choice((10, 20, 30, 50, 99, 100, rng.randint(8, 60)))


def counting(rng: random.Random, words: Sequence[str]) -> str:
    """Count from one number to another, up, in one of several formats."""
    first, last = _span(rng)
    if first == 1 and rng.random() < 0.7:
        last -= 1
    numbers = [str(n) for n in range(first, last + 1)]
    head = rng.choice(("Count from {} to {}: ", "Count from {} to {}: ", "Numbers {} to {}:\n", ""))
    separator = rng.choice((", ", ", ", " ", "\n"))
    return head.format(first, last) + separator.join(numbers) + rng.choice((".\n", "\n"))


def counting_down(rng: random.Random, words: Sequence[str]) -> str:
    """Count down to one."""
    first, last = rng.choice((10, 20, 30, 50, 60, 100, rng.randint(5, 100))), 1
    numbers = ", ".join(str(n) for n in range(first, last - 1, -1))
    return f"Count down from {first} to {last}: {numbers}.\n"


def counting_by(rng: random.Random, words: Sequence[str]) -> str:
    """Count in steps of 2, 5, 10 or 100."""
    step = rng.choice((2, 2, 5, 5, 10, 10, 100))
    count = rng.choice((20, 20, 40))
    numbers = [step * n for n in range(1, count + 1)]
    text = ", ".join(str(n) for n in numbers)
    return f"Count from {numbers[0]} to {numbers[-1]} in steps of {step}: {text}.\n"


def numbered(rng: random.Random, words: Sequence[str]) -> str:
    """Numbered lines around a fixed phrase: Step 1: ..., Step 2: ..."""
    label = rng.choice(("Step {}:", "Line {}:", "{}.", "Item {}:", "Chapter {}:", "[{}]"))
    phrase, count = _line(rng, words), rng.choice((8, 10, 12, 20, 30))
    head = rng.choice(("", f"Write {count} numbered lines that say: {phrase}\n"))
    return head + "".join(f"{label.format(n)} {phrase}\n" for n in range(1, count + 1))


def alphabet(rng: random.Random, words: Sequence[str]) -> str:
    """The alphabet, the week or the months, once or cycled."""
    items = list(rng.choice((string.ascii_lowercase, string.ascii_uppercase, WEEK, MONTHS)))
    start = rng.choice((0, 0, rng.randrange(len(items))))
    cycled = (items[start:] + items[:start]) * rng.choice((1, 2, 3, 4))
    head = "The alphabet: " if items[0] in "aA" and not start else ""
    return head + rng.choice((", ", " ", "\n")).join(cycled) + "\n"


def dates(rng: random.Random, words: Sequence[str]) -> str:
    """Consecutive days in ISO format, sometimes with the weekday."""
    day, weekday = date(rng.randint(2025, 2026), rng.randint(1, 12), 1), rng.random() < 0.3
    head = rng.choice(("", f"List the days from {day}:\n"))
    days = [day + timedelta(days=n) for n in range(rng.choice((10, 20, 31)))]
    return head + "".join(f"{d} {WEEK[d.weekday()]}\n" if weekday else f"{d}\n" for d in days)


def times_table(rng: random.Random, words: Sequence[str]) -> str:
    """A multiplication table, one product in each line."""
    factor = rng.randint(2, 12)
    head = rng.choice(("", f"The {factor} times table:\n"))
    count = rng.choice((10, 12))
    return head + "".join(f"{factor} x {n} = {factor * n}\n" for n in range(1, count + 1))


def markdown_table(rng: random.Random, words: Sequence[str]) -> str:
    """A table of n, its double and its square, or of constant cells."""
    rows = range(1, rng.choice((11, 16, 21)))
    if rng.random() < 0.5:
        lines = [f"| {n} | {2 * n} | {n * n} |" for n in rows]
        return "\n".join(["| n | double | square |", "| --- | --- | --- |", *lines]) + "\n"
    name, value = rng.choice(words), rng.choice(words)
    lines = [f"| {n} | {name} | {value} |" for n in rows]
    return "\n".join(["| row | name | value |", "| --- | --- | --- |", *lines]) + "\n"


GENERATORS: dict[Generator, int] = {
    repeated_line: 10, repeated_cycle: 3, repeated_stanza: 2, counting: 7, counting_down: 2, counting_by: 4,
    numbered: 3, alphabet: 2, dates: 2, times_table: 2, markdown_table: 2,
}  # fmt: skip
