"""A pair with a draft in groups of ranks and KV sharded over the sequence: the tokens of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from model.serving.engine import Engine
from tests.compile.tiny import write_model
from tests.model.demo_bundle import ROOT, shape_of
from tests.model.run_eight_ranks import REQUESTS, graphs


def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    """Greedy and filtered; k, batch and the number of ranks differ too."""
    heads = {"scale": 0.5, "num_attention_heads": 8, "eos_token_id": None}
    write_model(tmp_path / "target", 5, num_key_value_heads=4, **heads)  # type: ignore[arg-type]
    write_model(tmp_path / "draft", 5, num_key_value_heads=2, num_hidden_layers=1, **heads)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "tests.model.run_eight_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["slices"]) == {2}
    # what the devices hand from one step to the next, on all of them
    assert found["ahead"] == found["ids"]
    assert found["followed"] > 2
    g = graphs(tmp_path, "one", k=1, batch=3)
    results = Engine(g, shape_of(g.bundle)).run(REQUESTS)
    assert found["ids"] == [r.ids for r in results]
    assert 0 < sum(sum(r.accepted) for r in results) < sum(sum(r.drafted) for r in results)
    assert [len(r.ids) for r in results] == [request.max_new_tokens for request in REQUESTS]
