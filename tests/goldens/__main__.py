"""`python -m tests.goldens [--only TEXT]`: compare what the tree computes with the record of commit bc64a24.

The record has ids, log-probabilities, margins of ids, accepted drafts, plans and kernels' times; commit 9dce423 has the
code that made it. Only public commands are used: `compile.build`, `trnspec.LLM`, `bench.kernels`.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import trnspec
from tests.goldens.cases import CLASSES, DEMO, DEMO_DRAFTS, VOCABULARY, Case, cases, write_tiny
from tests.goldens.compare import Arrays, Setting, compare_ids, compare_kernels, compare_plans, split

DATA = Path(__file__).parent / "data"
# BEST: of a record's log-probabilities
LENGTH, BATCH, BEST = 256, 4, 3
_SOME, _ALL = ("none", "chain", "eagle3"), ("none", "chain", "ngram", "parallel", "dflash", "dspark", "eagle3")
SETTINGS = {f"tiny-{dtype}-tp{tp}": Setting("tiny", dtype, tp, 3, 60, ("none", "chain"))
            for dtype in ("fp32", "bf16") for tp in (1, 2)}  # fmt: skip
SETTINGS |= {
    "demo-fp32-tp1": Setting("demo", "fp32", 1, 7, 60, _ALL),
    "demo-fp32-tp2": Setting("demo", "fp32", 2, 7, 20, _SOME),
    "demo-bf16-tp1": Setting("demo", "bf16", 1, 7, 20, _SOME),
}
_DEMO = ["--target", "demo/target", "--batch", "4", "--tp", "1", "--max-len", "512", "--dtype", "fp32",
         "--kernels", "reference"]  # fmt: skip
PLANS = {
    f"32B+1.7B-tp32-k7-{kernels}-{length}": ["--tp", "32", "--k", "7", "--kernels", kernels, "--max-len", length]
    for kernels in ("reference", "nki") for length in ("1024", "4096")
} | {
    "32B+1.7B-tp8-k7": ["--tp", "8", "--k", "7", "--kernels", "reference"],
    "32B-tp32-k0": ["--tp", "32", "--k", "0", "--kernels", "reference"],
    "32B+0.6B-tp32-k3,7-nki": ["--tp", "32", "--k", "3,7", "--kernels", "nki", "--draft", "Qwen/Qwen3-0.6B"],
    "demo-chain": [*_DEMO, "--draft", "demo/draft"],
    "demo-eagle3": [*_DEMO, "--draft", "demo/draft_eagle3"],
    "demo-dspark": [*_DEMO, "--draft", "demo/draft_dspark"],
}  # fmt: skip
NAMES = (*SETTINGS, "plans", "kernels")


def command(module: str, *arguments: str) -> str:
    """What a command of the project prints; its errors come through."""
    run = subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout


def plans() -> dict[str, Any]:
    """Of each spec the bytes per rank and of each graph a digest, the number of tensors by group, and collectives."""
    specs = {}
    for name, flags in PLANS.items():
        plan = json.loads(command("compile.build", "--dry-run", "--json", *flags))
        graphs = {}
        for graph in plan["graphs"]:
            counts = [len(graph.get(group, ())) for group in ("inputs", "outputs", "weights", "state")]
            digest = hashlib.sha256(json.dumps(graph, sort_keys=True).encode()).hexdigest()[:16]
            graphs[Path(graph["file"]).name.partition(".")[0]] = [digest, *counts, graph["collectives"]]
        specs[name] = {"bytes_per_rank": plan["bytes_per_rank"], "buckets": plan["buckets"], "graphs": graphs}
    return specs


def kernels() -> dict[str, float]:
    """Simulated microseconds of each case of `bench.kernels`."""
    rows = map(json.loads, command("bench.kernels", "--json").splitlines())
    return {row["case"]: row["us"] for row in rows}


def outputs_of(bundle: Path, requests: Sequence[Case]) -> list[Any]:
    """The requests served by a bundle, in groups of equal options."""
    outputs: list[Any] = []
    with trnspec.LLM(bundle) as llm:
        while len(outputs) < len(requests):
            options = requests[len(outputs)].options
            group = [case for case in requests[len(outputs) :] if case.options is options]
            outputs += llm.generate([c.prompt for c in group], [trnspec.Params(**c.params) for c in group], **options)
    gc.collect()
    return outputs


def drafts_of(output: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Drafts offered and accepted by position."""
    return output.drafted, output.accepted


def arrays_of(outputs: Sequence[Any]) -> Arrays:
    """Ids and log-probabilities, flat, with their counts of each request: new ids, their scores, the prompt's."""
    rows = [score for o in outputs for score in (*o.scores, *o.prompt_scores)]
    logprobs, ids = np.full((len(rows), 1 + BEST), np.nan, np.float32), np.zeros((len(rows), 1 + BEST), np.uint16)
    for row, score in enumerate(rows):
        logprobs[row, 0], ids[row, 0] = score.logprob, score.rank
        for n, (token, logprob) in enumerate(score.best):
            logprobs[row, 1 + n], ids[row, 1 + n] = logprob, token
    counts = [(len(o.ids), len(o.scores), len(o.prompt_scores)) for o in outputs]
    return {
        "ids": np.array([token for o in outputs for token in o.ids], np.uint16),
        "counts": np.array(counts, np.uint16), "logprobs": logprobs, "best": ids,
    }  # fmt: skip


def measured(name: str) -> Arrays:
    """A setting's ids and log-probabilities, accepted drafts (drafters, classes, offered and accepted, k), and of how
    many requests a drafter's ids or log-probabilities are not those of the first one."""
    setting = SETTINGS[name]
    requests = cases(setting.model, VOCABULARY[setting.model], setting.count)
    arrays: Arrays = {}
    accepted = np.zeros((len(setting.drafters), len(CLASSES), 2, setting.k), np.int32)
    different = np.zeros(len(setting.drafters), np.int32)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_tiny(Path(folder)) if setting.model == "tiny" else {"target": DEMO / "target"}
        folders |= {n: DEMO / f for n, f in DEMO_DRAFTS.items() if setting.model == "demo"}
        flags = ["--target", str(folders["target"]), "--dtype", setting.dtype, "--tp", str(setting.tp)]
        flags += ["--batch", str(BATCH), "--max-len", str(LENGTH), "--kernels", "reference"]
        for number, drafter in enumerate(setting.drafters):
            begin, bundle = time.perf_counter(), Path(folder) / drafter
            drafts = {"none": ["--k", "0"], "ngram": ["--drafter", "ngram", "--k", str(setting.k)]}.get(drafter)
            drafts = drafts or ["--draft", str(folders[drafter]), "--k", str(setting.k)]
            command("compile.build", *flags, *drafts, "--out", str(bundle))
            outputs = outputs_of(bundle, requests)
            for case, output in zip(requests, outputs, strict=True):
                for tally, counts in zip(accepted[number, CLASSES.index(case.kind)], drafts_of(output), strict=True):
                    tally[: len(counts)] += np.array(counts, np.int32)
            new = arrays_of(outputs)
            arrays = arrays or new
            different[number] = sum(
                not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*pair, strict=True))
                for pair in zip(split(arrays), split(new), strict=True)
            )
            print(f"{name} {drafter}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        arrays |= {"accepted": accepted, "different": different}
    return arrays


def compare(name: str) -> bool:
    """Compute one name again and print how it differs from the record."""
    if name in SETTINGS:
        with np.load(DATA / f"{name}.npz") as file:
            return compare_ids(name, SETTINGS[name], dict(file), measured(name))
    old = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return compare_plans(old, plans()) if name == "plans" else compare_kernels(old, kernels())


def main() -> None:
    """Compare the names that contain the text of --only."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.add_argument("--only", default="", help=f"names with this text, of {', '.join(NAMES)}")
    options = parser.parse_args()
    # JAX reads it when the first bundle is opened
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    results = [compare(name) for name in NAMES if options.only in name]
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
