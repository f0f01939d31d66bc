"""Qwen3-32B's shapes with each drafter's at tp 32: the graphs are built without weights, in bounded time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import full_builds as bench
from model.bundle.manifest import read_bundle
from model.errors import UserError


@pytest.mark.parametrize("drafter", ["parallel", "eagle3"])
def test_a_build_of_full_widths_holds_no_weights(drafter: str, tmp_path: Path) -> None:
    """Seven layers and one bucket: one rank's weights of these would take 0.3 GB more."""
    row = bench.built(drafter, tmp_path, layers=7, max_len=128)
    assert bench.within(row), row
    bundle = read_bundle(tmp_path / "bundle")
    assert (bundle.drafting.kind, bundle["tp"], bundle["weights"]) == (drafter, 32, None)
    assert (bundle.config("target").hidden_size, bundle.config("target").num_hidden_layers) == (5120, 7)


# a process with a gigabyte starts one that says what it held itself, and what getrusage says
_LARGE_PARENT = """
import subprocess, sys
held = b"1" * (1 << 30)
child = "import resource; from compile.build import peak_bytes as p; print(p()); print(resource.getrusage(0)[2] << 10)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_build_s_peak_is_not_that_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", _LARGE_PARENT], capture_output=True, text=True, check=True)
    own, told = map(int, done.stdout.split())
    assert own < 1 << 30 < told


def test_the_heads_have_the_published_shapes() -> None:
    configs = bench.configs(64)
    assert configs["eagle3"]["eagle_aux_hidden_state_layer_ids"] == [2, 32, 61]
    assert (configs["parallel"]["hidden_size"], configs["medusa"]["hidden_size"]) == (1024, 5120)
    with pytest.raises(UserError, match="at least 7"):
        bench.main(["--layers", "3"])


def test_a_build_over_its_bounds_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"drafter": "medusa", "kernels": "reference", "layers": 64, "graphs": 20, "wall_seconds": 20.0}
    for peak, ended in ((0.5e9, False), (1.5e9, True)):
        rows = [row | {"peak_bytes": peak}]
        assert bench.within(rows[0]) != ended
        monkeypatch.setattr(bench, "built", lambda *_, of=rows: of[0])
        if ended:
            with pytest.raises(SystemExit):
                bench.main(["--drafters", "medusa"])
        else:
            bench.main(["--drafters", "medusa"])
