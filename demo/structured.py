"""Seeded generators of structured text: repetition, counting, lists, tables, JSON and simple Python."""

import calendar
import json
import random
import string
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

# lines and cycles are fixed, so that small models can learn them
LINES = (Path(__file__).parent / "text/lines.txt").read_text(encoding="utf-8").splitlines()
CYCLES = (
    "red green blue", "one two three four", "yes no", "tick tock", "north east south west", "left right", "a b c",
    "spring summer autumn winter", "do re mi fa sol la ti", "ha", "0 1", "foo bar baz",
)  # fmt: skip
REQUESTS = (
    "Repeat the following line exactly {n} times: {line}\n", "Repeat this line {n} times: {line}\n",
    "Write the line below {n} times.\n{line}\n\n", "Say it {n} times: {line}\n",
)  # fmt: skip
COUNTS = (3, 4, 5, 6, 8, 10, 12, 20, 30, 40, 50, 100)
NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy")
OPERATIONS = (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("mod", "%"), ("pow", "**"))
FIELDS = ("x", "y", "z", "name", "size", "color", "width", "height", "price", "count", "title")
Record = Callable[[int], dict[str, Any]]
RECORDS: tuple[Record, ...] = (
    lambda n: {"id": n, "name": NAMES[n % 10], "email": f"{NAMES[n % 10].lower()}@example.com"},
    lambda n: {"id": n, "name": NAMES[n % 10], "active": True},
    lambda n: {"id": n, "name": NAMES[n % 10], "score": 10 * n},
    lambda n: {"index": n, "value": 2 * n, "valid": True},
    lambda n: {"step": n, "status": "done", "error": None},
    lambda n: {"item": f"item-{n}", "price": 5 * n, "currency": "EUR"},
)


def repeated_line(rng: random.Random) -> str:
    """An instruction to repeat a line, then the line that many times."""
    line, n = rng.choice(LINES), rng.choice(COUNTS)
    return rng.choice(REQUESTS).format(n=n, line=line) + (line + "\n") * n


def repeated_cycle(rng: random.Random) -> str:
    """A cycle of words, or a stanza of lines, repeated."""
    if rng.random() < 0.4:
        stanza = "".join(rng.choice(LINES) + "\n" for _ in range(rng.randint(2, 4)))
        return (stanza + "\n") * rng.choice(COUNTS[:7])
    return rng.choice((" ", ", ", "\n", " - ")).join(rng.choice(CYCLES).split() * rng.choice(COUNTS)) + "\n"


def counting(rng: random.Random) -> str:
    """Numbers that count up, down, or in steps."""
    step, last = rng.choice((1, 1, 1, -1, 2, 5, 10, 100)), rng.choice((10, 20, 30, 50, 99, 100, rng.randint(8, 60)))
    if step < 0:
        return f"Count down from {last} to 1: {', '.join(str(n) for n in range(last, 0, -1))}.\n"
    first = step if step > 1 else rng.choice((0, 1, 1, 1, 1, rng.randint(2, 99)))
    numbers = [str(first + step * n) for n in range(20 if step > 1 else last)]
    rule = f" in steps of {step}" if step > 1 else ""
    head = rng.choice((f"Count from {numbers[0]} to {numbers[-1]}{rule}: ", f"Numbers {first} to {numbers[-1]}:\n", ""))
    return head + rng.choice((", ", ", ", " ", "\n")).join(numbers) + ".\n"


def numbered(rng: random.Random) -> str:
    """Numbered lines around a fixed phrase, or numbered assignments."""
    label = rng.choice(("Step {}: ", "Line {}: ", "{}. ", "Item {}: ", "Chapter {}: ", "[{}] "))
    phrase, count = rng.choice(LINES), rng.choice((8, 10, 12, 20, 30))
    if rng.random() < 0.3:
        label, phrase = rng.choice(("x_{0} = {0}", "value_{0} = {0}", "row_{0} = {0}")), ""
    return "".join(label.format(n) + phrase + "\n" for n in range(1, count + 1))


def listed(rng: random.Random) -> str:
    """The alphabet, the week, the months, or consecutive days."""
    kinds = (string.ascii_lowercase, string.ascii_uppercase, calendar.day_name, list(calendar.month_name)[1:])
    if rng.random() < 0.4:
        day = date(rng.randint(2025, 2026), rng.randint(1, 12), 1)
        return "".join(f"{day + timedelta(days=n)}\n" for n in range(rng.choice((10, 20, 31))))
    return rng.choice((", ", " ", "\n")).join(list(rng.choice(kinds)) * rng.choice((1, 2, 3, 4))) + "\n"


def table(rng: random.Random) -> str:
    """A multiplication table, or n with its double and its square."""
    factor, rows = rng.randint(2, 12), range(1, rng.choice((11, 13, 16, 21)))
    if rng.random() < 0.5:
        return f"The {factor} times table:\n" + "".join(f"{factor} x {n} = {factor * n}\n" for n in rows)
    lines = [f"| {n} | {2 * n} | {n * n} |" for n in rows]
    return "\n".join(["| n | double | square |", "| --- | --- | --- |", *lines]) + "\n"


def records(rng: random.Random) -> str:
    """Records with fixed keys: JSON lines, or an array."""
    record, count = rng.choice(RECORDS), rng.choice((5, 6, 8, 10, 15, 20))
    rows, keys = [record(n) for n in range(1, count + 1)], ", ".join(record(1))
    if rng.random() < 0.5:
        head = rng.choice(("", f"Write a JSON array of {count} records with the keys {keys}.\n"))
        return head + json.dumps(rows, indent=rng.choice((None, 2))) + "\n"
    head = rng.choice(("", f"Write {count} JSON lines with the keys {keys}.\n"))
    return head + "".join(json.dumps(row) + "\n" for row in rows)


def functions(rng: random.Random) -> str:
    """Arithmetic functions, or a family of one of them."""
    (name, op), count = rng.choice(OPERATIONS), rng.choice((6, 8, 12))
    if rng.random() < 0.5:
        return "\n\n".join(f"def {n}(a, b):\n    return a {o} b\n" for n, o in OPERATIONS)
    return "\n\n".join(f"def {name}_{n}(x):\n    return x {op} {n}\n" for n in range(1, count + 1))


def code(rng: random.Random) -> str:
    """A loop with what it prints, test lines, or a class with its getters."""
    first, count, fields = rng.randint(1, 9), rng.choice((5, 10, 20)), rng.sample(FIELDS, rng.randint(2, 4))
    stores = "".join(f"        self.{field} = {field}\n" for field in fields)
    getters = "".join(f"\n    def get_{f}(self):\n        return self.{f}\n" for f in fields)
    tests = "".join(f"    assert add({first}, {n}) == {first + n}\n" for n in range(1, count + 1))
    return rng.choice((
        f"for i in range({count}):\n    print(i)\n\n# prints\n" + "".join(f"{n}\n" for n in range(count)),
        f"def test_add():\n{tests}",
        f"class Item:\n    def __init__(self, {', '.join(fields)}):\n{stores}{getters}",
    ))  # fmt: skip


GENERATORS: dict[Callable[[random.Random], str], int] = {
    repeated_line: 10, repeated_cycle: 5, counting: 13, numbered: 5, listed: 4, table: 4, records: 10, functions: 6,
    code: 7,
}  # fmt: skip
