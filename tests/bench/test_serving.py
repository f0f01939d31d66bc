"""Load on two servers: what is read from the public client's file, and no speedup on a red gate."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as serving
from bench.serving.prompts import prompt_sets
from bench.tune import acceptance
from model.errors import UserError
from tests.bench.endpoint import endpoint

# a saved result of `vllm bench serve` without --save-detailed: fields and meaning by vllm/benchmarks/serve.py; tpot is
# (latency - ttft) / (completion_tokens of usage - 1), itl is by chunk
RESULT: dict[str, Any] = {
    "date": "20261122-160000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "m",
    "tokenizer_id": "demo/target", "num_prompts": 6, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 4,
    "duration": 0.3, "completed": 6, "failed": 0, "total_input_tokens": 120, "total_output_tokens": 768,
    "request_throughput": 20.0, "request_goodput": None, "output_throughput": 2435.4, "total_token_throughput": 2800.0,
    "max_output_tokens_per_s": 768.0, "max_concurrent_requests": 4,
    "spec_decode_acceptance_rate": 57.5, "spec_decode_acceptance_length": 5.02, "spec_decode_num_drafts": 150,
    "spec_decode_draft_tokens": 1050, "spec_decode_accepted_tokens": 603,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.22],
    "mean_ttft_ms": 22.0, "median_ttft_ms": 21.1, "std_ttft_ms": 1.0, "p99_ttft_ms": 25.0,
    "mean_tpot_ms": 1.3, "median_tpot_ms": 1.2, "std_tpot_ms": 0.1, "p99_tpot_ms": 1.5,
    "mean_e2el_ms": 180.0, "median_e2el_ms": 175.0, "std_e2el_ms": 5.0, "p99_e2el_ms": 190.0,
}  # fmt: skip
# a stand-in for the command: it writes that result, with twice the time per token for the server named baseline
CLIENT = """#!/usr/bin/env python3
import json, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1:3] == ["bench", "serve"], sys.argv
result = json.loads({result!r})
result["num_prompts"] = result["completed"] = int(flags["--num-prompts"])
if flags["--base-url"] == {baseline!r}:
    result["median_tpot_ms"] *= 2
    result = {{k: v for k, v in result.items() if not k.startswith("spec_decode")}}
open(flags["--result-filename"], "w").write(json.dumps(result))
open({log!r}, "a").write(json.dumps([flags["--base-url"], open(flags["--dataset-path"]).read()]) + "\\n")
"""


def _ids(body: dict[str, Any]) -> dict[str, Any]:
    return {"text": "x", "token_ids": [len(body["prompt"]), body["seed"] % 1000]}


def _run(folder: Path, other: Any) -> tuple[dict[str, Any], list[list[str]]]:
    """The results of the command between two endpoints, the second one answering as `other`, and the client's runs."""
    with endpoint(_ids) as baseline, endpoint(other) as speculative:
        client = folder / "vllm"
        client.write_text(CLIENT.format(result=json.dumps(RESULT), baseline=baseline, log=str(folder / "log")))
        client.chmod(client.stat().st_mode | stat.S_IXUSR)
        flags = ["--baseline", f"{baseline}/v1/", "--speculative", speculative, "--vllm", str(client), "--rounds", "4"]
        flags += ["--requests", "6", "--gate", "5", "--draft", "demo/draft", "--out", str(folder / "out.json")]
        try:
            serving.main(flags)
        finally:
            runs = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
            runs = [["baseline" if run[0] == baseline else "speculative", run[1]] for run in runs]
    return json.loads((folder / "out.json").read_text()), runs


def test_a_green_gate_shows_the_speedup_of_each_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, runs = _run(tmp_path, _ids)
    rows = {(r["tier"], r["endpoint"]): r for r in found["rows"]}
    assert {tier for tier, _ in rows} == {"structured", "open"}
    assert rows["open", "speculative"]["speedup"] == pytest.approx(2.0)
    assert rows["open", "speculative"]["spec_decode_acceptance_length"] == 5.02
    assert "spec_decode_acceptance_length" not in rows["open", "baseline"]
    assert {"source", "commit", "machine", "date"} <= found.keys()
    assert "token-identical" in capsys.readouterr().out
    # each tier's prompts to each server in every round, in an order that is drawn
    pairs = [runs[at : at + 2] for at in range(0, len(runs), 2)]
    assert len(pairs) == 2 * 4
    assert all({a, b} == {"baseline", "speculative"} and x == y for (a, x), (b, y) in pairs)
    assert len({pair[0][0] for pair in pairs}) == 2
    (table, _) = acceptance.read(tmp_path / "out.json")
    assert (table.draft, table.steps) == ("draft", 600)
    assert table.shares == pytest.approx((0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.22))


def test_a_red_gate_shows_no_speedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        _run(tmp_path, lambda body: {"text": "x", "token_ids": [9]})
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["gate"][0]["differences"]) == 5
    assert not [row for row in found["rows"] if "speedup" in row]
    out = capsys.readouterr().out
    assert "NOT identical: no speedup is shown" in out
    assert "differs at token 0" in out


def test_the_chosen_k_is_held_against_the_better_of_the_fixed_ones() -> None:
    """Round by round, for each number of clients apart."""
    rates = {
        (1, serving.BASELINE): (100, 200), (1, serving.FIXED): (50, 100), (1, serving.SPECULATIVE): (99, 198),
        (4, serving.BASELINE): (100, 300), (4, serving.FIXED): (150, 450), (4, serving.SPECULATIVE): (150, 441),
    }  # fmt: skip
    nothing = dict.fromkeys(serving.FIGURES, None) | {"median_tpot_ms": 1.0}
    rows = [
        nothing | {"tier": "open", "clients": clients, "endpoint": name, "round": n, "output_throughput": rate}
        for (clients, name), pair in rates.items()
        for n, rate in enumerate(pair)
    ]
    of_best = {(r["clients"], r["endpoint"]): r.get("of_best") for r in serving.summary(rows, green=True)}
    assert of_best[1, serving.SPECULATIVE] == pytest.approx(0.99)
    assert of_best[4, serving.SPECULATIVE] == pytest.approx(0.99)
    assert of_best[4, serving.FIXED] == pytest.approx(1.5)
    assert of_best[1, serving.BASELINE] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [({"completed": 5, "failed": 1}, "got 5 of 6 answers"), ({"median_tpot_ms": None}, "got 6 of 6 answers")],
)
def test_a_load_with_lost_answers_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RESULT | change))
    with pytest.raises(UserError, match=said):
        serving.figures(tmp_path / "r.json", 6)
    for text in ("", "[]", "{}"):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(UserError, match="is no result of vllm bench serve"):
            serving.figures(tmp_path / "r.json", 6)


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    client = tmp_path / "vllm"
    client.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 3\n")
    client.chmod(0o755)
    with endpoint(_ids) as one, endpoint(_ids) as two:
        flags = ["--baseline", one, "--speculative", two, "--gate", "2"]
        with pytest.raises(UserError, match="vllm bench serve failed: ValueError: no such model"):
            serving.main([*flags, "--vllm", str(client)])
        with pytest.raises(UserError, match="check --vllm"):
            serving.main([*flags, "--vllm", str(tmp_path / "absent")])


@pytest.mark.parametrize("arguments", [[], ["--baseline", "a"], ["--demo", "--speculative", "b"]])
def test_two_servers_are_needed(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="two servers are compared"):
        serving.main(arguments)


def test_the_demo_s_servers_need_vllm_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make serve-environment"):
        serving.main(["--demo", "--vllm", str(tmp_path / "absent"), "--folder", str(tmp_path / "bundles")])
    assert not (tmp_path / "bundles").exists()


def test_prompts_are_of_sets_or_of_a_file(tmp_path: Path) -> None:
    both = prompt_sets("pod,article", 0)
    assert len(both) == 8 + 2
    assert prompt_sets("pod,article", 0) == both
    assert sorted(prompt_sets("pod,article", 1)) == sorted(both) != prompt_sets("pod,article", 1)
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert sorted(p.text for p in prompt_sets(str(tmp_path / "mine.txt"), 0)) == ["one", "two"]
    (tmp_path / "empty.txt").write_text("\n")
    for name, said in (("nonsense", "no set of prompts"), (str(tmp_path / "empty.txt"), "holds no prompt")):
        with pytest.raises(UserError, match=said):
            prompt_sets(name, 0)
