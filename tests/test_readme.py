"""README and pages: links, commands and files exist, examples run, git ignores what commands write."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from compile.spec import parse
from model.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "nki_kernels/README.md", "deploy/README.md", "demo/README.md")
PAGES = [*(ROOT / name for name in READMES), *sorted(ROOT.glob("docs/*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
_COMMAND = re.compile(r"    (?:make|\.venv/bin/python -m) .*")
_DURATION = re.compile(r"#.*\b(?:seconds?|minutes?|hours)\b")
_WRITTEN = re.compile(r"--(?:out|recording) (\S+)")
_FOLDERS = r"(?:trnspec|nki_kernels|nkisim|model|compile|bench|deploy|serve|demo|docs|tests)"
_FILE = re.compile(rf"`({_FOLDERS}/[\w./-]*(?:/|\.(?:py|md|json|svg|ya?ml|sh|txt)))`")
_EXAMPLE = re.compile(r"^```python\n(>>> .*?)^```", re.S | re.M)
_BUILD = re.compile(r"python3? -m compile\.build (--[^\n#]+)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)


def anchors(text: str) -> set[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def wrong_links(page: str, text: str) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", text)):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    return wrong


def wrong_names(text: str) -> list[str]:
    """Modules, files and make targets that a text names and the tree lacks."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    modules = {m for m in re.findall(r"python -m ([\w.]+)", text) if re.match(_FOLDERS + r"\b", m)}
    files = {f for f in _FILE.findall(text) if not (ROOT / f).exists()}
    makes = set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.M)) - targets
    return sorted({m for m in modules if importlib.util.find_spec(m) is None} | files | makes)


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_names_exist(page: str) -> None:
    assert wrong_links(page, TEXTS[page]) == []
    assert wrong_names(TEXTS[page]) == []


def test_the_check_finds_what_is_missing() -> None:
    links = "[a](docs/none.md) [b](docs/decisions.md#none) [c](docs/serving.md)"
    assert wrong_links("README.md", links) == ["docs/none.md", "docs/decisions.md#none"]
    names = "`make none` `make test` python -m bench.none `model/none.py` `trnspec/llm.py`"
    assert wrong_names(names) == ["bench.none", "model/none.py", "none"]


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if _EXAMPLE.search(text)])
def test_examples_print_what_the_page_shows(page: str) -> None:
    """Examples with `>>>`; the examples of a page share variables."""
    text = "\n".join(_EXAMPLE.findall(TEXTS[page]))
    example = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_builds_of_pages_have_valid_options() -> None:
    """Every `compile.build` command is parsed, and its spec checked if its models are available."""
    specs = [parse(shlex.split(line)) for text in TEXTS.values() for line in _BUILD.findall(text)]
    assert len(specs) > 5
    for spec in specs:
        if spec.target in PRESETS or Path(spec.target).is_dir():
            spec.check()


def _commands() -> list[str]:
    """The commands of README, continued lines joined."""
    return [line for line in TEXTS["README.md"].replace("\\\n", "").splitlines() if _COMMAND.fullmatch(line)]


def test_every_command_states_its_duration() -> None:
    assert len(_commands()) > 9
    assert [line for line in _commands() if not _DURATION.search(line)] == []


def test_readme_and_pages_stay_short() -> None:
    pages = [text for page, text in TEXTS.items() if page.startswith("docs/")]
    assert len(TEXTS["README.md"].splitlines()) <= 110
    assert len(pages) <= 8
    assert sum(len(text.encode()) for text in pages) <= 90_000
    assert len(TEXTS["docs/decisions.md"].encode()) <= 20_000


def test_what_commands_write_is_ignored() -> None:
    lines = [line for text in TEXTS.values() for line in text.splitlines() if " -m " in line]
    written = {name for name in _WRITTEN.findall("\n".join(lines)) if re.fullmatch(r"[a-z][\w./-]*", name)}
    # committed results are not ignored; a name without a suffix is a folder
    outputs = sorted(n if "." in n else f"{n}/" for n in written if not n.startswith("bench/results/"))
    assert "bundles/parallel/" in outputs
    command = ["git", "check-ignore", "--no-index", *outputs]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == outputs
