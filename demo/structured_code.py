"""Seeded generators of structured text: JSON and simple Python."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from demo.structured import Generator

NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy")
CITIES = ("Athens", "Berlin", "Cairo", "Delhi", "Essen", "Florence", "Geneva", "Hanoi")
OPERATIONS = (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("mod", "%"), ("pow", "**"))
FIELDS = ("x", "y", "z", "name", "size", "color", "width", "height", "price", "count", "title")

Record = Callable[[int], dict[str, Any]]


def _name(n: int) -> str:
    return NAMES[(n - 1) % len(NAMES)]


RECORDS: tuple[Record, ...] = (
    lambda n: {"id": n, "name": _name(n), "email": f"{_name(n).lower()}@example.com"},
    lambda n: {"id": n, "name": _name(n), "active": True},
    lambda n: {"id": n, "name": _name(n), "score": 10 * n},
    lambda n: {"index": n, "value": 2 * n, "valid": True},
    lambda n: {"id": n, "city": CITIES[(n - 1) % len(CITIES)], "visited": False},
    lambda n: {"step": n, "status": "done", "error": None},
    lambda n: {"item": f"item-{n}", "price": 5 * n, "currency": "EUR"},
)


def json_lines(rng: random.Random, words: Sequence[str]) -> str:
    """Records with fixed keys, each on a line."""
    record, count = rng.choice(RECORDS), rng.choice((6, 8, 10, 20))
    head = f"Write {count} JSON lines with the keys {', '.join(record(1))}.\n"
    lines = "".join(json.dumps(record(n)) + "\n" for n in range(1, count + 1))
    return rng.choice(("", "", head)) + lines


def json_array(rng: random.Random, words: Sequence[str]) -> str:
    """An array of records, on one line or indented."""
    record, count = rng.choice(RECORDS), rng.choice((5, 8, 10, 15))
    head = f"Write a JSON array of {count} records with the keys {', '.join(record(1))}.\n"
    records = [record(n) for n in range(1, count + 1)]
    return rng.choice(("", head)) + json.dumps(records, indent=rng.choice((None, 2))) + "\n"


def json_object(rng: random.Random, words: Sequence[str]) -> str:
    """One object whose values follow from its keys, or an array of integers."""
    count = rng.choice((8, 10, 20))
    key = rng.choice(("key", "field", "layer", "item", rng.choice(words)))
    if rng.random() < 0.3:
        return json.dumps({"name": key, "numbers": list(range(1, count + 1))}) + "\n"
    return json.dumps({f"{key}_{n}": n for n in range(1, count + 1)}, indent=2) + "\n"


def functions(rng: random.Random, words: Sequence[str]) -> str:
    """Arithmetic functions in a fixed order, two arguments each."""
    a, b = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("left", "right")))
    bodies = [f"def {name}({a}, {b}):\n    return {a} {op} {b}\n" for name, op in OPERATIONS]
    return "\n\n".join(bodies)


def function_family(rng: random.Random, words: Sequence[str]) -> str:
    """def add_1(x): return x + 1, def add_2(x): return x + 2, and so on."""
    name, op = rng.choice(OPERATIONS)
    count = rng.choice((6, 8, 12))
    bodies = [f"def {name}_{n}(x):\n    return x {op} {n}\n" for n in range(1, count + 1)]
    return "\n\n".join(bodies)


def loop(rng: random.Random, words: Sequence[str]) -> str:
    """A loop and, below it, what it prints."""
    count, step = rng.choice((5, 10, 20)), rng.randint(1, 3)
    factor = f" * {step}" if step > 1 else ""
    printed = "".join(f"{n * step}\n" for n in range(count))
    return f"for i in range({count}):\n    print(i{factor})\n\n# prints\n{printed}"


def assertions(rng: random.Random, words: Sequence[str]) -> str:
    """Test lines: assert add(1, 1) == 2, assert add(1, 2) == 3, and so on."""
    first = rng.randint(1, 9)
    lines = [f"    assert add({first}, {n}) == {first + n}\n" for n in range(1, rng.randint(9, 21))]
    return "def test_add():\n" + "".join(lines)


def record_class(rng: random.Random, words: Sequence[str]) -> str:
    """A class with an __init__ that stores its fields and a getter for each."""
    fields = rng.sample(FIELDS, rng.randint(2, 4))
    name = rng.choice(("Point", "Shape", "Item", "Record"))
    stores = "".join(f"        self.{field} = {field}\n" for field in fields)
    getters = "".join(f"\n    def get_{f}(self):\n        return self.{f}\n" for f in fields)
    return f"class {name}:\n    def __init__(self, {', '.join(fields)}):\n{stores}{getters}"


def assignments(rng: random.Random, words: Sequence[str]) -> str:
    """Numbered assignments of one shape."""
    name, count = rng.choice(("x", "value", "row", rng.choice(words))), rng.choice((8, 12, 20))
    return "".join(f"{name}_{n} = {n}\n" for n in range(1, count + 1))


GENERATORS: dict[Generator, int] = {
    json_lines: 6, json_array: 4, json_object: 3, functions: 3, function_family: 3, loop: 2, assertions: 2,
    record_class: 3, assignments: 2,
}  # fmt: skip
