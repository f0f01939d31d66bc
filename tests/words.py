"""`python -m tests.words [PATH ...]`: private words in names, docstrings, comments and messages; exit 1 if any.

docs/contributing.md has the rule. `-l` lists each use as file:line: word.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the dictionary's left column, in names and in prose; docs/contributing.md has the right one
NAMES = (
    "told|tell|tells|asked|asks|asking|beside|behind|alone|own|whole|held|kept|keeps|drawn|draws|most|least|"
    "seat|seated|found|quicker|slower|misfit|damage|lap|pace|heat|turned|turn|turns|door|theirs|handed|"
    "handover|said|says|meant|travel|grown|shrunk|lent|claims|piece|pieces|stranger|strangers"
)
PROSE = (
    r"told|tells?|asked|asks|asking|besides?|behind|alone|owns?|whole|held|kept|drawn|draws?|seat|seated|quicker|misfits?"
    r"|damages?|damaged|laps?|pace|heat|turned|turns|doors?|theirs|handed|handover|said|stands|found|of which|of whom"
    r"|the text|the pair|take apart|taken apart|near ties|travels?|under way|borders?|strangers?"
)
# uses that the field has too
PHRASES = (
    r"at least|at most|whole number|in turn|(its|their|your) own|"
    r"held[- _]out|(not|no \S+|was|were) found|ties? drawn"
)
PHRASES += r"|border(-\w+)?: "


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a module defines, with their lines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def prose(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, messages (strings with a space) and comments, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def uses(file: Path) -> Iterator[tuple[int, str]]:
    """(line, word) of each private word in a file."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for line, name in names(tree):
        for part in re.findall(r"[A-Z]?[a-z]+", re.sub(PHRASES, "", name)):
            if re.fullmatch(NAMES, part.lower()):
                yield line, f"{part.lower()} in {name}"
    for line, sentence in prose(text, tree):
        plain = re.sub(PHRASES, "", re.sub(r"`[^`]*`", "", sentence), flags=re.IGNORECASE)
        for found in re.finditer(rf"\b({PROSE})\b", plain, re.IGNORECASE):
            yield line, found[0].lower()


def main() -> None:
    """Print the uses by package, and each with -l."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    parser.add_argument("paths", nargs="*", default=["."])
    parser.add_argument("-l", "--list", action="store_true")
    options = parser.parse_args()
    listed = ["git", "ls-files", "--", *(f"{path}/**.py" if Path(path).is_dir() else path for path in options.paths)]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    counts, words = Counter[str](), Counter[str]()
    for name in files:
        if name == "tests/words.py":
            continue
        for line, use in uses(ROOT / name):
            counts[name.split("/")[0]] += 1
            words[use.split(" in ")[0]] += 1
            if options.list:
                print(f"{name}:{line}: {use}")
    print(dict(counts), sum(counts.values()))
    print(words.most_common(80))
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()
