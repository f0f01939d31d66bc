"""The demo pair with a draft in groups of ranks and KV sharded over the sequence: the tokens of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from model.serving.engine import Engine
from tests.model.demo_bundle import ROOT, graphs, shape_of
from tests.model.run_sharded_demo import requests


def test_tokens_are_those_of_one_rank(base: Path) -> None:
    """Greedy and sampled; k, batch and the number of ranks differ too."""
    command = [sys.executable, "-m", "tests.model.run_sharded_demo", str(base)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["slices"]) == {2}
    # what the devices hand from one step to the next, on all of them
    assert found["ahead"] == found["ids"]
    assert found["followed"] > 2
    g = graphs(base)
    asked = requests(g)
    lengths = sorted(len(r.ids) for r in asked)
    assert lengths[0] < 128 < lengths[1]
    assert found["ids"] == [r.ids for r in Engine(g, shape_of(g.bundle)).run(asked)]
