"""README and pages: links, named files, modules and targets exist, examples print what the page shows."""

from __future__ import annotations

import doctest
import importlib.util
import re

import pytest

from docs.console import ROOT, rewritten
from nkisim.timeline.chip import CASES
from nkisim.timeline.costs.dma import collective_ns
from nkisim.timeline.trn2 import TRN2

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


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "```console\n$ nkisim" in text])
def test_commands_print_what_the_page_shows(page: str) -> None:
    """`make docs` writes the output of commands; times and digests of a page are those of this source."""
    assert rewritten(TEXTS[page]) == TEXTS[page]


def test_a_stale_figure_is_replaced() -> None:
    page = TEXTS["docs/quickstart.md"]
    assert rewritten(page.replace("  7.72 us", "  7.71 us")) == page
    assert "  7.72 us" in page


@pytest.mark.parametrize("ranks", [4, 8, 16, 32, 64])
def test_the_times_of_collectives_are_those_of_the_law(ranks: int) -> None:
    low, nominal, high = (collective_ns(0, ranks, 2, TRN2.at(case)) / 1e3 for case in CASES)
    assert f"| {ranks} | {low:.1f} | {nominal:.1f} | {high:.1f} |" in TEXTS["docs/time.md"]
