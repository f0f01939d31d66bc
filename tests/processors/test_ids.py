"""The demo bundle's ids and files are equal whatever instruction set XLA and torch are held to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.processors.environments import Environment, graph_environments, results, torch_environments

SETS = {"XLA-AVX2": ["avx2"], "XLA-SSE4_2": []}


def files(bundle: Path) -> dict[str, str]:
    """A hash of every file but the notes on the build."""
    listed = (path for path in bundle.rglob("*") if path.is_file())
    named = {str(path.relative_to(bundle)): path for path in listed}
    return {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in named.items() if not n.startswith(".")}


@pytest.mark.parametrize("environment", graph_environments(), ids=str)
def test_the_ids_of_the_demo_bundle(environment: Environment, bundle: Path, ids: dict[str, Any]) -> None:
    """Greedy, drawn, and drawn from the most probable ids alone."""
    if environment.why_not:
        pytest.skip(environment.why_not)
    forced = results(environment, "ids", str(bundle))
    assert forced["sets"] == SETS[environment.name]
    assert forced["ids"] == ids["ids"]


def test_seeds_and_prompts_have_ids_of_their_own(ids: dict[str, Any]) -> None:
    """Negative control: what is compared is not the same text again and again."""
    texts = [tuple(text) for text in ids["ids"].values()]
    assert min(map(len, texts)) > 5
    assert len(set(texts)) >= 6


@pytest.mark.parametrize("environment", torch_environments(), ids=str)
def test_the_files_of_the_demo_bundle(environment: Environment, bundle: Path, tmp_path: Path) -> None:
    """Graphs that torch traced and weights that it packed."""
    if environment.why_not:
        pytest.skip(environment.why_not)
    forced = results(environment, "demo_bundle", str(tmp_path / "demo"))
    assert forced["torch"] == environment.variables["ATEN_CPU_CAPABILITY"].upper()
    assert files(tmp_path / "demo") == files(bundle)
    assert len(files(bundle)) > 10
