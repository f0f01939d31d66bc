"""`vllm serve` of a bundle of two ranks through a real PJRT plugin that is registered as `neuron`: the CPU's ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.demo_bundle import graphs
from tests.runtime.neffs import find_stand_ins
from tests.serve.server import NO_VLLM, Server, served
from tests.serve.test_nrt import DRAWN, check_ids
from tests.stand_ins import PLUGIN
from trnspec.llm import Params

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graphs.__wrapped__(tmp_path_factory.mktemp("pjrt"), tp=2, k=2, batch=2, max_len=128).bundle.path


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        find_stand_ins(patch, PLUGIN)
        with served(bundle, tmp_path_factory.mktemp("log"), "--additional-config", '{"platform": "neuron"}') as running:
            yield running


@pytest.mark.parametrize("params", [Params(), DRAWN], ids=["greedy", "drawn"])
def test_its_ids_are_those_of_the_same_bundle_on_the_cpu(params: Params, server: Server, bundle: Path) -> None:
    check_ids(server, bundle, params, "neuron")
