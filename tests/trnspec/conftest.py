"""A bundle of the demo pair behind the front door, shared with the other tests of the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from model.llm import LLM
from tests.model.demo_bundle import graphs


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo bundle: k 7, batch 4, length 256, fp32."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return graphs(folder).bundle.path


@pytest.fixture(scope="session")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        yield opened
