"""Load on servers: what is read from the public client's file, CPU time, and no ratio where an answer differs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as serving
from bench.serving.servers import Endpoint
from bench.serving.servers import serving as started
from bench.tune import acceptance
from model.errors import UserError
from tests.bench.endpoint import endpoint

# a saved result of `vllm bench serve`, by vllm/benchmarks/serve.py
RESULT: dict[str, Any] = {
    "completed": 6, "failed": 0, "output_throughput": 2400.0, "median_ttft_ms": 21.1, "median_tpot_ms": 1.2,
    "spec_decode_acceptance_length": 5.02, "spec_decode_num_drafts": 150,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.22],
}  # fmt: skip
# a stand-in for the command: it writes that result, with half of the tokens a second for the server named baseline
CLIENT = """#!/usr/bin/env python3
import json, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1:3] == ["bench", "serve"], sys.argv
result = json.loads({result!r})
result["completed"] = int(flags["--num-prompts"])
if flags["--base-url"] == {baseline!r}:
    result = {{k: v for k, v in result.items() if not k.startswith("spec_decode")}} | {{"output_throughput": 1200.0}}
open(flags["--result-filename"], "w").write(json.dumps(result))
run = flags["--base-url"], flags["--max-concurrency"], open(flags["--dataset-path"]).read()
open({log!r}, "a").write(json.dumps(run) + "\\n")
"""


def _ids(body: dict[str, Any]) -> dict[str, Any]:
    return {"text": "x", "token_ids": [len(body["prompt"]), body["seed"] % 1000]}


def _script(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def _run(
    folder: Path, other: Callable[[dict[str, Any]], dict[str, Any]], rounds: int = 1
) -> tuple[dict[str, Any], list[list[str]]]:
    """The results of the command between two endpoints, the second one answering as `other`, and the client's runs."""
    with endpoint(_ids) as baseline, endpoint(other) as speculative:
        text = CLIENT.format(result=json.dumps(RESULT), baseline=baseline, log=str(folder / "log"))
        flags = f"--baseline {baseline}/v1/ --speculative {speculative} --requests 6 --clients 4 --gate 5".split()
        flags += ["--rounds", str(rounds), "--vllm", _script(folder / "vllm", text), "--out", str(folder / "out.json")]
        try:
            serving.main(flags)
        finally:
            runs = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
            runs = [["baseline" if run[0] == baseline else "speculative", *run[1:]] for run in runs]
    return json.loads((folder / "out.json").read_text()), runs


def test_identical_answers_show_the_ratio_of_each_class_of_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, runs = _run(tmp_path, _ids, rounds=2)
    rows = {(r["prompts"], r["clients"], r["server"]): r for r in found["rows"]}
    assert {key[:2] for key in rows} == {("structured", 4), ("open", 4)}
    assert rows["open", 4, "speculative"]["times baseline"] == 2.0
    assert rows["open", 4, "speculative"]["spec_decode_acceptance_length"] == 5.02
    assert "spec_decode_acceptance_length" not in rows["open", 4, "baseline"]
    assert {"source", "commit", "machine", "date"} <= found.keys()
    assert "token-identical" in capsys.readouterr().out
    # the prompts of a class to each server in every round, in an order that is drawn
    pairs = [runs[at : at + 2] for at in range(0, len(runs), 2)]
    assert len(pairs) == 2 * 2
    assert all({a, b} == {"baseline", "speculative"} and x == y for (a, *x), (b, *y) in pairs)
    assert len({pair[0][0] for pair in pairs}) == 2
    # the tuner reads the file
    (table, _) = acceptance.read(tmp_path / "out.json")
    assert (table.drafter, table.shares) == ("", (0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.22))


def test_different_answers_show_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        _run(tmp_path, lambda body: {"text": "x", "token_ids": [9]})
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["gate"]["differences"]) == 5
    assert not [row for row in found["rows"] if "times baseline" in row]
    out = capsys.readouterr().out
    assert "NOT identical: no ratio is shown" in out
    assert "differs at token 0" in out


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down between two rounds does not show."""
    speeds = {serving.BASELINE: 100.0, serving.SPECULATIVE: 190.0, serving.STOCK: 95.0}
    rows = [
        {"prompts": "open", "clients": 4, "round": n, "server": name, "output_throughput": speed / 2**n,
         "cpu_ms_per_token": 1.0 + n, "median_ttft_ms": 1.0, "median_tpot_ms": 1.0}
        for n in range(5) for name, speed in speeds.items()
    ]  # fmt: skip
    found = {r["server"]: r for r in serving.summary(rows, identical=True)}
    assert (found[serving.SPECULATIVE]["times baseline"], found[serving.SPECULATIVE]["times stock vLLM"]) == (1.9, 2.0)
    assert found[serving.STOCK]["cpu_ms_per_token"] == 3.0
    assert "| open | 4 | speculative | 47.50 | 3.00 | 1.00 | 1.00 |  | 1.90 | 2.00 |" in serving.table(
        list(found.values())
    )


@pytest.mark.parametrize(
    ("change", "said"), [({"completed": 5}, "got 5 of 6 answers"), ({"median_tpot_ms": None}, "got 6 of 6 answers")]
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
    failing = _script(tmp_path / "vllm", "#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 3\n")
    with endpoint(_ids) as one, endpoint(_ids) as two:
        flags = ["--baseline", one, "--speculative", two, "--gate", "2", "--vllm", failing]
        with pytest.raises(UserError, match="vllm bench serve failed: ValueError: no such model"):
            serving.main(flags)


def test_cpu_time_is_of_the_whole_tree_of_processes() -> None:
    here = Endpoint("", "", os.getpid())
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as child:
        begin, own = here.cpu_seconds(), time.process_time()
        while here.cpu_seconds() - begin - (time.process_time() - own) < 0.2:
            time.sleep(0.05)
        child.kill()


def test_a_server_that_ends_while_it_starts_is_a_sentence(tmp_path: Path) -> None:
    command, log = Path(_script(tmp_path / "vllm", "#!/bin/sh\nenv\n")), tmp_path / "log"
    with pytest.raises(UserError, match="ended while it started"), started(command, 8999, [], log, A_NAME="set"):
        pass
    assert {"NPROC=1", "A_NAME=set"} <= set(log.read_text().splitlines())


@pytest.mark.parametrize("more", [[], ["--baseline", "http://a"], ["--demo", "--speculative", "http://b"]])
def test_two_servers_are_needed(more: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two servers are compared"):
        serving.main(["--vllm", _script(tmp_path / "vllm", ""), *more])


def test_the_demo_needs_an_environment_with_vllm_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(SystemExit, match="2"):
            serving.main(["--demo", "--vllm", str(tmp_path / name), "--folder", str(tmp_path / "bundles")])
        assert "make serve-environment" in capsys.readouterr().err
    (tmp_path / "python").symlink_to("/bin/false")
    with pytest.raises(UserError, match="lacks vLLM or pandas; run make serve-report"):
        serving.main(["--demo", "--vllm", _script(tmp_path / "vllm", ""), "--folder", str(tmp_path / "bundles")])
    assert not (tmp_path / "bundles").exists()
