"""The real torch_xla in the loop: its environment, one case of `make xla-check`, and that each departure is named.

`make xla-check` makes the environment, 2.3 GB in .xla; without it the second test is skipped. The source is held to
the same rules without it, by test_static_graph_code.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile.neuron.flags import FUSED
from compile.neuron.sdk import nxdi_graphs
from compile.neuron.xla_check import environment
from compile.neuron.xla_check.cases import CASES
from compile.neuron.xla_check.hold import departures
from compile.recipes import ROOT
from trnspec.bundle import hlo
from trnspec.bundle.plan import make_plan

CASE = "demo-tp2"


def test_the_stand_ins_are_made_without_a_package_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make` runs last, by a Python without packages, over a torch that has no library."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "_run", lambda *command: commands.append(command))
    (tmp_path / "lib/python3/site-packages/torch/lib").mkdir(parents=True)
    environment.make(tmp_path)
    bare = [sys.executable, "-S", *commands[-1][1:]]
    done = subprocess.run(bare, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _conditional(module: Any) -> None:
    module.computations[0].instructions[0].opcode = "conditional"


def _one_group(module: Any) -> None:
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "all-reduce":
                del instruction.replica_groups[0].replica_ids[1:]


def _fallback(lowered: dict[str, Any]) -> None:
    lowered["fallbacks"] = ["aten::view_copy.dtype"]


def _unread(lowered: dict[str, Any]) -> None:
    del lowered["parameters"]["target_model.lm_head.weight"]


def _crossed(lowered: dict[str, Any]) -> None:
    first, second, *_ = lowered["aliases"]
    lowered["aliases"][first], lowered["aliases"][second] = lowered["aliases"][second], lowered["aliases"][first]


OF_PROTO: dict[str, Callable[[Any], None]] = {
    "it holds a conditional, which the Neuron SDK does not take": _conditional,
    "which do not share out 2 ranks": _one_group,
}
OF_LOWERED: dict[str, Callable[[dict[str, Any]], None]] = {
    "aten::view_copy.dtype fell back to the CPU": _fallback,
    "nothing reads target_model.lm_head.weight": _unread,
    "its aliases are not the caches and the counts": _crossed,
}


def test_the_real_torch_xla_lowers_and_runs_the_demo_pair(tmp_path: Path) -> None:
    folder = ROOT / ".xla"
    if not (folder / environment.SYMBOLS).is_file():
        pytest.skip("there is no environment of torch_xla in .xla; make xla-check makes it")
    command = [sys.executable, "-m", "compile.neuron.xla_check", "--env", str(folder), "--only", CASE]
    done = subprocess.run([*command, "--keep", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"{CASE}: held, 60 tokens equal\n", done.stderr[-2000:]
    # and what departs is named
    plan = make_plan(CASES[CASE].bundle)
    graph = nxdi_graphs(plan, FUSED)[0]
    proto = (tmp_path / f"{CASE}-{FUSED}.hlo.pb").read_bytes()
    text = (tmp_path / f"{CASE}-{FUSED}.json").read_text(encoding="utf-8")
    assert list(departures(plan, graph, proto, json.loads(text))) == []
    for said, edit in OF_PROTO.items():
        module = hlo.parse(proto)
        edit(module)
        assert said in " ".join(departures(plan, graph, module.SerializeToString(), json.loads(text)))
    for said, change in OF_LOWERED.items():
        lowered = json.loads(text)
        change(lowered)
        assert said in " ".join(departures(plan, graph, proto, lowered))
