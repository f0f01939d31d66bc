"""Load on servers: figures of the client's file, CPU time, and no ratio if an output differs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as serving
from bench.serving.servers import Endpoint
from bench.serving.servers import serving as started
from bench.tune import acceptance
from model.errors import UserError
from tests.bench.endpoint import endpoint, seeded_ids

# a saved result of `vllm bench serve`, by vllm/benchmarks/serve.py
RESULT: dict[str, Any] = {
    "completed": 6, "output_throughput": 2400.0, "median_ttft_ms": 21.1, "median_tpot_ms": 1.2, "median_itl_ms": 6.0,
    "median_e2el_ms": 173.5, "p99_ttft_ms": 30.2, "p99_tpot_ms": 1.5, "p99_itl_ms": 7.5, "p99_e2el_ms": 220.7,
    "spec_decode_acceptance_length": 5.02, "spec_decode_num_drafts": 150,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.8, 0.7],
}  # fmt: skip
# a stand-in for the vllm command: it writes RESULT, with half of the throughput for the baseline
CLIENT = """#!/usr/bin/env python3
import json, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1:3] == ["bench", "serve"] and flags["--num-prompts"] == "6", sys.argv
result = json.loads({result!r})
if flags["--base-url"] == {baseline!r}:
    result = {{k: v for k, v in result.items() if not k.startswith("spec_decode")}} | {{"output_throughput": 1200.0}}
open(flags["--result-filename"], "w").write(json.dumps(result))
"""


def _script(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("identical", [True, False])
def test_ratios_are_shown_if_outputs_are_identical(
    identical: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return seeded_ids(body) if identical else {"text": "x", "token_ids": [9]}

    with endpoint(seeded_ids) as baseline, endpoint(answer) as speculative:
        vllm = _script(tmp_path / "vllm", CLIENT.format(result=json.dumps(RESULT), baseline=baseline))
        flags = f"--baseline {baseline}/v1/ --speculative {speculative} --requests 6 --clients 4 --gate 5 --rounds 1"
        with nullcontext() if identical else pytest.raises(SystemExit, match="1"):
            serving.main([*flags.split(), "--vllm", vllm, "--out", str(tmp_path / "out.json")])
    result, out = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    rows = {(r["prompts"], r["clients"], r["server"]): r for r in result["rows"]}
    assert len(rows) == 4
    assert rows["open", 4, "speculative"].get("times baseline") == (2.0 if identical else None)
    assert rows["open", 4, "speculative"]["spec_decode_acceptance_length"] == 5.02
    assert (rows["open", 4, "baseline"]["median_itl_ms"], rows["open", 4, "baseline"]["p99_e2el_ms"]) == (6.0, 220.7)
    assert len(result["gate"]["differences"]) == (0 if identical else 5)
    assert ("NOT identical: no ratio is shown" in out, "differs at token 0" in out) == (not identical, not identical)
    # the tuner reads the file
    assert [known.shares for known in acceptance.read(tmp_path / "out.json")] == 2 * [(0.9, 0.8, 0.7)]


def test_ratios_are_taken_within_a_round() -> None:
    """A slower machine in a later round does not change them."""
    speeds = {serving.BASELINE: 100.0, serving.SPECULATIVE: 190.0, serving.STOCK: 95.0}
    rows = [
        RESULT | {"prompts": "open", "clients": 4, "round": n, "server": name, "output_throughput": speed / 2**n,
                  "cpu_ms_per_token": 1.0 + n}
        for n in range(5) for name, speed in speeds.items()
    ]  # fmt: skip
    table = serving.table(serving.summary(rows, identical=True))
    assert "| open | 4 | speculative | 47.50 | 3.00 | 21.10 | 1.20 | 5.02 | 1.90 | 2.00 |" in table


def test_a_load_without_all_answers_is_refused(tmp_path: Path) -> None:
    for result, message in (
        (RESULT | {"completed": 5}, "got 5 of 6 answers"),
        (RESULT | {"median_tpot_ms": None}, "got 6 of 6 answers"),
        ([], "is no result of vllm bench serve"),
    ):
        (tmp_path / "r.json").write_text(json.dumps(result))
        with pytest.raises(UserError, match=message):
            serving.figures(tmp_path / "r.json", 6)


def test_cpu_time_includes_child_processes() -> None:
    here = Endpoint("", "", os.getpid())
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as child:
        begin, parent = here.cpu_seconds(), time.process_time()
        while here.cpu_seconds() - begin - (time.process_time() - parent) < 0.2:
            time.sleep(0.05)
        child.kill()


def test_missing_options_and_packages_are_refused_before_a_build(tmp_path: Path) -> None:
    vllm, bundles = _script(tmp_path / "vllm", "#!/bin/sh\nenv\n"), tmp_path / "bundles"
    for more in ([], ["--baseline", "http://a"], ["--demo", "--speculative", "http://b"]):
        with pytest.raises(UserError, match="two servers are compared"):
            serving.main(["--vllm", vllm, *more])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        serving.main(["--demo", "--vllm", str(tmp_path / "file")])
    (tmp_path / "python").symlink_to("/bin/false")
    with pytest.raises(UserError, match="lacks vLLM or pandas; run make serve-report"):
        serving.main(["--demo", "--vllm", vllm, "--folder", str(bundles)])
    assert not bundles.exists()
    with pytest.raises(UserError, match="ended while it started"), started(Path(vllm), 8999, [], tmp_path / "log"):
        pass
    assert "NPROC=1" in (tmp_path / "log").read_text().splitlines()
