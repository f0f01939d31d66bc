"""The gate of token identity: equal answers pass, a forged id is found and placed, and requests are of every kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench import demo, gate
from bench.serving.servers import Endpoint
from model.errors import UserError
from tests.bench.endpoint import endpoint
from trnspec.llm import LLM


def test_the_requests_are_of_every_kind() -> None:
    asked = gate.questions(200)
    params = [q.params for q in asked]
    assert {q.k_limit for q in asked} == {None, 0, 1}
    for values in ({p.temperature for p in params}, {p.top_k for p in params}, {p.min_p for p in params}):
        assert len(values) > 1
    assert {p.filter for p in params} == {True, False}
    assert len({q.text for q in asked}) > len(demo.prompts()), "some are three prompts and the beginning of their copy"
    assert gate.questions(200) == asked != gate.questions(200, seed=1)


@pytest.mark.parametrize(
    ("baseline", "speculative", "at"),
    [([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([1], [1, 2], 1), ([4], [5], 0)],
    ids=["differs", "shorter", "longer", "first"],
)
def test_the_first_difference_is_placed(baseline: list[int], speculative: list[int], at: int) -> None:
    (found,) = gate.differences([[7], baseline], [[7], speculative])
    assert (found.question, found.at, found.before) == (1, at, baseline[:at])
    assert not gate.differences([baseline], [baseline])


@pytest.mark.slow
def test_the_demo_pair_passes_and_a_forged_id_is_found_and_weighed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair, file = demo.bundle(tmp_path / "pair", "chain", 3, batch=2, max_len=128), tmp_path / "gate.json"
    flags = ["--bundle", str(pair), "--requests", "4", "--tokens", "6", "--out", str(file), "--seed", "3"]
    gate.main(flags)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["requests"], row["differences"], row["dtype"]) == (4, [], "fp32")
    assert row["tokens_per_step"] > 1
    real = LLM.generate

    def forged(self: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        outputs = real(self, prompts, params, **options)
        if options["speculation"] and "k_limit" not in options:
            ids = (*outputs[0].ids[:-1], outputs[0].ids[-1] ^ 1)
            outputs[0] = dataclasses.replace(outputs[0], ids=ids)
        return outputs

    monkeypatch.setattr(LLM, "generate", forged)
    with pytest.raises(SystemExit, match="1"):
        gate.main([*flags, "--checkpoint", str(demo.TARGET)])
    ((found,),) = (row["differences"] for row in json.loads(file.read_text())["rows"])
    assert found["baseline"][0] == found["speculative"][0] ^ 1
    assert found["at"] == len(found["before"])
    assert "logits apart by" in capsys.readouterr().out
    with pytest.raises(UserError, match="128"):
        gate.main([*flags, "--tokens", "128"])


def _ids(body: dict[str, Any]) -> dict[str, Any]:
    return {"text": "x", "token_ids": [len(body["prompt"]), body["seed"] % 1000, body["max_tokens"]]}


def _other(body: dict[str, Any]) -> dict[str, Any]:
    return _ids(body) | {"token_ids": [len(body["prompt"]), -1 if body["temperature"] else body["seed"] % 1000, 4]}


def test_two_servers_are_compared_by_ids(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "20", "--tokens", "4"]
    with endpoint(_ids) as first, endpoint(_ids) as second, endpoint(_other) as third:
        gate.main(["--baseline", first, "--speculative", second, *flags])
        with pytest.raises(SystemExit, match="1"):
            gate.main(["--baseline", first, "--speculative", third, *flags])
    drawn = [n for n, q in enumerate(gate.questions(20)) if q.params.temperature]
    out = capsys.readouterr().out
    assert out.count("differs at token 1") == min(len(drawn), 10)
    assert f"| {len(drawn)} |" in out


def test_an_endpoint_without_ids_is_compared_by_characters_and_a_dead_one_is_one_sentence() -> None:
    with endpoint(lambda body: {"text": "same"}) as first, endpoint(lambda body: {"text": "some"}) as second:
        ends = [Endpoint(address, "m") for address in (first, second)]
        (found, *_) = gate.of_endpoints(*ends, gate.questions(3), 4)["differences"]
    assert (found["at"], found["baseline"][:3]) == (1, ["a", "m", "e"])
    with pytest.raises(UserError, match="gave no completion"):
        gate.main(["--baseline", "http://127.0.0.1:1", "--speculative", "http://127.0.0.1:1", "--requests", "3"])


@pytest.mark.parametrize("arguments", [[], ["--baseline", "http://a"], ["--bundle", "a", "--baseline", "http://a"]])
def test_one_comparison_is_asked_for(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="one comparison is made"):
        gate.main(arguments)


def test_wrong_options_are_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, said in (
        ("--baseline", "ftp://a", "give an address such as"),
        ("--requests", "0", "a number from 1"),
        ("--out", str(tmp_path), "is not a regular file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            gate.main([option, value])
        assert said in capsys.readouterr().err
    with pytest.raises(UserError, match="no checkpoint"):
        gate.main(["--bundle", "a", "--checkpoint", str(tmp_path)])
