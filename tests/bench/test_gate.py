"""The gate of token identity: equal outputs pass, a forged id is reported with its position, all kinds of requests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer

from bench import demo, gate
from bench.serving.servers import Endpoint
from model.errors import UserError
from tests.bench.endpoint import endpoint, seeded_ids
from trnspec.engine.request import Params
from trnspec.llm import Output


def test_the_requests_are_of_every_kind() -> None:
    requests = gate.questions(200)
    kinds = {(q.k_limit, q.params.temperature > 0, q.params.filters) for q in requests}
    assert len(kinds) == 3 * 3, "greedy requests have no filters"
    assert len({q.text for q in requests}) > len(demo.prompts()), "some are three prompts and their repetition"
    assert gate.questions(200) == requests != gate.questions(200, seed=1)


def test_the_position_of_the_first_difference() -> None:
    for a, b, at in (([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([1], [1, 2], 1), ([4], [5], 0)):
        (difference,) = gate.differences([[7], a], [[7], b])
        assert (difference.question, difference.at) == (1, at)
        assert not gate.differences([a], [a])


def test_a_bundle_passes_and_a_forged_id_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stand-in for the LLM of the demo pair; speculation changes one id of the sets of requests in `forged`."""
    forged = list[dict[str, Any]]()

    def generate(prompts: list[list[int]], params: list[Params], **options: Any) -> list[Output]:
        assert all(0 < len(ids) <= 64 - 7 - 6 for ids in prompts)
        ids = [[5, p.seed % 999, 7 + (options in forged and n == 0)] for n, p in enumerate(params)]
        return [Output(row, steps=1) for row in ids]

    llm = mock.MagicMock()
    monkeypatch.setattr(gate, "LLM", llm)
    opened = llm.return_value.__enter__.return_value
    opened.tokenizer, opened.generate = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json")), generate
    opened.bundle.spec = SimpleNamespace(k=7, max_len=64, drafter="chain", batch=1, dtype="fp32")
    flags = f"--requests 9 --tokens 6 --out {tmp_path}/gate.json --bundle pair".split()
    gate.main(flags)
    (row,) = json.loads((tmp_path / "gate.json").read_text())["rows"]
    assert (row["requests"], row["differences"], row["tokens_per_step"]) == (9, [], 2.0)
    forged.append({"max_new_tokens": 6, "speculation": True})
    with pytest.raises(SystemExit, match="1"):
        gate.main(flags)
    assert "differs at token 2: [7], [8]" in capsys.readouterr().out
    opened.bundle.spec.k = 0
    with pytest.raises(UserError, match="give the bundle of a pair"):
        gate.main(flags)


def _other(body: dict[str, Any]) -> dict[str, Any]:
    return seeded_ids(body | {"seed": -1} if body["temperature"] else body)


def test_two_servers_are_compared_by_ids_or_characters_and_a_dead_one_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags, sampled = ["--requests", "20", "--tokens", "4"], [q for q in gate.questions(20) if q.params.temperature]
    with endpoint(seeded_ids) as first, endpoint(seeded_ids) as second, endpoint(_other) as third:
        gate.main(["--baseline", first, "--speculative", second, *flags])
        with pytest.raises(SystemExit, match="1"):
            gate.main(["--baseline", first, "--speculative", third, *flags])
    out = capsys.readouterr().out
    assert (out.count("differs at token 1"), f"| {len(sampled)} |" in out) == (min(len(sampled), 10), True)
    with endpoint(lambda body: {"text": "same"}) as first, endpoint(lambda body: {"text": "some"}) as second:
        ends = [Endpoint(address, "m") for address in (first, second)]
        (difference, *_) = gate.compare_endpoints(*ends, gate.questions(3), 4)["differences"]
    assert (difference["at"], difference["baseline"][:3]) == (1, ["a", "m", "e"])
    with pytest.raises(UserError, match="gave no completion"):
        gate.main(["--baseline", first, "--speculative", second, *flags])


def test_one_comparison_is_made_and_wrong_options_are_refused_at_the_start() -> None:
    for words in ("", "--baseline http://a", "--bundle a --baseline http://a"):
        with pytest.raises(UserError, match="one comparison is made"):
            gate.main(words.split())
    for words in ("--baseline ftp://a", "--requests 0", "--out /dev/null"):
        with pytest.raises(SystemExit, match="2"):
            gate.main(words.split())
