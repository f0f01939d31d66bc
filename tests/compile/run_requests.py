"""The tokens of a few requests from bundles: here, or in a process of its own where they need more ranks.

The number of CPU devices is chosen once in a process: `python -m tests.compile.run_requests MAX_TOKENS BUNDLE...`
prints a JSON list.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from compile.recipes import ROOT
from tests.model.family import AsTheyRun
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

REQUESTS = [
    Request((3, 5, 7), Params(), 16),
    Request((9, 2, 40, 41, 6), Params(1.0, 0, 1.0, 0.0, 5), 16),
    Request((11,), Params(0.7, 8, 0.9, 0.0, 2**40), 12),
]


def tokens(bundle: Path, max_tokens: int) -> list[list[int]]:
    """The ids of each request, at most so many."""
    opened = read_bundle(bundle)
    requests = [dataclasses.replace(r, max_new_tokens=min(r.max_new_tokens, max_tokens)) for r in REQUESTS]
    return [r.ids for r in Engine(AsTheyRun(opened), engine_config(opened)).run(requests)]


def tokens_of_process(bundles: Sequence[Path], max_tokens: int) -> list[list[list[int]]]:
    """The same of each bundle, in one new process."""
    command = [sys.executable, "-m", "tests.compile.run_requests", str(max_tokens), *map(str, bundles)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[2:]]
    jax.config.update("jax_num_cpu_devices", max(read_bundle(path).spec.tp for path in paths))
    print(json.dumps([tokens(path, int(sys.argv[1])) for path in paths]))
