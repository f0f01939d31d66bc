"""`python -m bench.serving_pair --vllm VLLM`: two servers of the demo pair under load, by a public client and by ours.

The baseline is a server of the target alone, the other one speculates with 7 drafts; both are ours, of batch 4, and up
on loopback at the same time, asked one after the other. `vllm bench serve` sends random ids and the demo's prompts;
then `bench.serving` sends the demo's prompts, compares the answers and writes its report.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.provenance import header, write_result
from bench.side_by_side import DEMO, WAYS, Way, serving
from model.errors import UserError, run_cli

_BATCH, _CLIENT_SECONDS = 4, 1800
_BASELINE, _SPECULATIVE = (way for way in WAYS if way.ours)
# of what the public client saves
_FIGURES = ("completed", "output_throughput", "median_ttft_ms", "median_tpot_ms", "spec_decode_acceptance_length")


def main(arguments: list[str]) -> None:
    """Start both servers, run both clients, write what they say."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving_pair", description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="the command of an environment with this package")
    parser.add_argument("--out", type=Path, default=Path("bench/results/serving"), help="folder of the report")
    parser.add_argument("--folder", type=Path, default=Path("bundles/side_by_side"), help="for bundles and logs")
    parser.add_argument("--requests", type=int, default=60, help="of the public client, of each kind")
    parser.add_argument("--each", type=int, default=8, help="requests a prompt of bench.serving")
    parser.add_argument("--every", type=int, default=3, help="take every n-th prompt of the demo's")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--port", type=int, default=8770, help="the first of four")
    options = parser.parse_args(arguments)
    for folder in (options.folder, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    prompts, begun = _prompts(options), header("wall")
    with ExitStack() as stack:
        addresses = {
            way: stack.enter_context(serving(way, _BATCH, options)).removesuffix("/v1/completions")
            for way in (_BASELINE, _SPECULATIVE)
        }
        rows = [_public(way, kind, addresses[way], options) for kind in ("random", "demo") for way in addresses]
        print(table(rows))
        # results are tracked: whoever asks for the commit while they are written is told of a changed checkout
        report = options.folder / "report"
        _ours(addresses, prompts, report, options)
    write_result(options.out / "vllm_bench_serve.json", begun | {"rows": rows})
    # what each request got is half a megabyte that the report sums up
    shutil.copytree(report, options.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("requests.jsonl"))


def _prompts(options: argparse.Namespace) -> Path:
    """The demo's prompts as both clients read them, a JSON line each."""
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"][:: options.every]
    file: Path = options.folder / "prompts.jsonl"
    lines = [{"prompt": p["text"], "text": p["text"], "name": p["name"], "tier": p["entropy"]} for p in prompts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def _public(way: Way, kind: str, address: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `vllm bench serve` says of a server under random ids, or under the demo's prompts."""
    result = options.folder / "client.json"
    random = ["random", "--random-input-len", "64", "--random-output-len", str(options.tokens)]
    demo = ["custom", "--dataset-path", str(options.folder / "prompts.jsonl"), "--skip-chat-template"]
    dataset = random if kind == "random" else [*demo, "--custom-output-len", str(options.tokens)]
    command = [str(options.vllm), "bench", "serve", "--backend", "openai", "--base-url", address, "--model", "m"]
    command += ["--endpoint", "/v1/completions", "--tokenizer", str(DEMO / "target"), "--seed", "1"]
    command += ["--dataset-name", *dataset]
    command += ["--num-prompts", str(options.requests), "--max-concurrency", str(_BATCH), "--temperature", "0"]
    command += ["--ignore-eos", "--save-result", "--result-filename", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_SECONDS, check=False)
    if done.returncode:
        raise UserError(f"vllm bench serve failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    said = json.loads(result.read_text(encoding="utf-8"))
    return {"way": way.name, "prompts": kind, "source": "wall"} | {name: said.get(name) for name in _FIGURES}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each server and kind of prompts."""
    heads = ("prompts", "way", *_FIGURES)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = (f"{row[h]:.2f}" if isinstance(row[h], float) else "" if row[h] is None else str(row[h]) for h in heads)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ours(addresses: dict[Way, str], prompts: Path, report: Path, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "bench.serving", "--baseline", addresses[_BASELINE], "--api", "completions"]
    command += ["--speculative", addresses[_SPECULATIVE], "--prompts", str(prompts), "--out", str(report)]
    # a round fills the batch
    rounds = max(1, options.each // _BATCH)
    command += ["--requests", str(options.each), "--rounds", str(rounds), "--concurrency", str(_BATCH)]
    command += ["--max-tokens", str(options.tokens), "--token-ids", "--ignore-eos", "--draft", "demo/draft"]
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"bench.serving failed or its answers differ; see {report}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
