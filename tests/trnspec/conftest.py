"""A bundle of the demo pair in `LLM`, shared with the other tests of the session, and a tiny one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from compile.build import build
from tests.compile.tiny import spec, write_pair
from tests.model.demo_bundle import graphs
from trnspec.engine.request import Params
from trnspec.llm import LLM


@pytest.fixture(scope="session")
def bundle(demo_bundles: Path) -> Path:
    """The folder of a demo bundle: k 7, batch 4, length 256, fp32."""
    return graphs(demo_bundles).bundle.path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle that a new process compiles in seconds, and that is compiled here."""
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    bundle = build(spec(folder, k=1, batch=1))
    with LLM(bundle) as opened:
        opened.generate([5], max_new_tokens=2)
    return bundle


@pytest.fixture(scope="session")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        # graphs are compiled here, and not by the first test that runs one
        for options in ({}, {"k_limit": 0}):
            opened.generate(["1, 2, 3,", [5] * 150], Params(temperature=0.8, seed=7), max_new_tokens=100, **options)
        yield opened
