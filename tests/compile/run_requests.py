"""`python -m tests.compile.run_requests BUNDLE [MOST]`: the tokens of a few requests, at most so many each, as JSON; a
process of its own because the number of CPU devices is chosen once in a process."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from model.bundle.opening import read_bundle
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs

REQUESTS = [
    Request((3, 5, 7), Params(), 16),
    Request((9, 2, 40, 41, 6), Params(1.0, 0, 1.0, 0.0, 5), 16),
    Request((11,), Params(0.7, 8, 0.9, 0.0, 2**40), 12),
]

if __name__ == "__main__":
    bundle = read_bundle(Path(sys.argv[1]))
    engine = Engine(Graphs(bundle), shape_of(bundle))
    most = int(sys.argv[2]) if len(sys.argv) > 2 else max(r.max_new_tokens for r in REQUESTS)
    shortened = [dataclasses.replace(r, max_new_tokens=min(r.max_new_tokens, most)) for r in REQUESTS]
    results = engine.run(shortened)
    print(json.dumps({"ids": [r.ids for r in results], "ranks": bundle.spec.tp}))
