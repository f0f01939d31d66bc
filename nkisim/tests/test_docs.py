"""README and pages: links, named files, modules and targets exist, examples print what the page shows."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("validation/*.md")]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in sorted(PAGES)}
_FILE = re.compile(r"`((?:src|docs|tests|examples|validation)/[\w./-]*(?:/|\.(?:py|md|json|svg|ya?ml|txt)))`")
_MODULE = re.compile(r"python -m ((?:nkisim|validation)[\w.]*)")
_EXAMPLE = re.compile(r"^```python\n(>>> .*?)^```", re.S | re.M)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)


def anchors(text: str) -> set[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def wrong(page: str, text: str) -> list[str]:
    """Links to files or headings that do not exist; files, modules and targets of the Makefile likewise."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", text)):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            missing.append(link)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    files = {file for file in _FILE.findall(text) if not (ROOT / file).exists()}
    modules = {module for module in _MODULE.findall(text) if importlib.util.find_spec(module) is None}
    return missing + sorted(files | modules | set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.M)) - targets)


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_names_exist(page: str) -> None:
    assert wrong(page, TEXTS[page]) == []


def test_the_check_reports_what_is_missing() -> None:
    text = "[a](docs/none.md) [b](README.md#none) `make none` `make test` python -m nkisim.none `src/nkisim/none.py`"
    assert wrong("README.md", text) == ["docs/none.md", "README.md#none", "nkisim.none", "none", "src/nkisim/none.py"]


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if _EXAMPLE.search(text)])
def test_examples_print_what_the_page_shows(page: str) -> None:
    """Examples with `>>>`; those of a page share their names."""
    text = "\n".join(_EXAMPLE.findall(TEXTS[page]))
    example = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
