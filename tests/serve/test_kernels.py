"""`vllm serve` of a bundle with NKI kernels on two ranks, which the simulator runs: the ids of the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from tests.compile.test_ranks import PACKED
from tests.compile.tiny import spec, write_model
from tests.model.demo_bundle import ROOT
from tests.serve.server import OWN_SERVER, sample, served
from trnspec.llm import LLM, Params

pytestmark = OWN_SERVER
REQUESTS = [((3, 5, 7), Params()), ((9, 2, 40, 41, 6), Params(temperature=1.0, seed=5)), ((11,), Params())]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft is the target's first layer, so that some drafts are accepted."""
    folder = tmp_path_factory.mktemp("kernels")
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 1, 0.2, **PACKED, vocab_size=2048, num_hidden_layers=layers)
        # vLLM encodes letters when it starts, and the tiny tokenizer has none
        shutil.copy(ROOT / "demo/target/tokenizer.json", folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(base: Path) -> list[list[int]]:
    prompts, params = zip(*REQUESTS, strict=True)
    with LLM(build(spec(base, "reference", k=1, graphs="greedy"))) as llm:
        return [output.ids for output in llm.generate(prompts, params, max_new_tokens=6)]


@pytest.mark.parametrize("options", [{"k": 1}, {"speculation": False}], ids=str)
def test_its_ids_are_the_reference_s(
    options: dict[str, Any], base: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    bundle = build(spec(base, "kernels", k=1, tp=2, kernels="nki", layers=2, graphs="greedy"))
    with served(bundle, tmp_path, "--served-model-name", "m", "--additional-config", json.dumps(options)) as server:
        for (ids, params), tokens in zip(REQUESTS, expected, strict=True):
            body = {"model": "m", "prompt": list(ids), "max_tokens": 6, "return_token_ids": True, "seed": params.seed}
            _, answer = server.post("/v1/completions", body | {"temperature": params.temperature})
            assert answer["choices"][0]["token_ids"] == tokens
        assert server.post("/v1/completions", body | {"logprobs": 1})[0] == 400, "greedy graphs have none"
        if options.get("k"):
            assert sample(server, "vllm:spec_decode_num_accepted_tokens_total") > 0
