"""`python -m compile.neuron.xla_check --env FOLDER --out FILE`: lower with the real torch_xla, compare, run, record.

For every graph of model.pt's module: no operator fell back to the CPU while it was traced; inputs, outputs, aliases and
collectives are the plan's, without an opcode that the SDK refuses; the tokens are the eager module's for the requests
that NxDI's host sends. It is used from a checkout: the wheel does not contain it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compile.neuron.sdk import nxdi_graphs, nxdi_tags
from compile.neuron.xla_check import environment, run
from compile.neuron.xla_check.cases import CASES, RUN
from compile.neuron.xla_check.hold import departures, opcodes
from model.errors import UserError, run_cli
from model.provenance import header
from trnspec.bundle.plan import make_plan
from trnspec.runtime.pjrt import devices_of


def check(case: str, python: Path, folder: Path) -> dict[str, Any]:
    """The result of a case; `departures` is empty if everything held."""
    begin, plan = time.perf_counter(), make_plan(CASES[case].bundle)
    result: dict[str, Any] = {"departures": [], "graphs": {}}
    lowered: dict[str, Any] = {}
    for tag in nxdi_tags(plan):
        if said := _lower(python, case, tag, folder):
            result["departures"].append(said)
            continue
        graph = nxdi_graphs(plan, tag)[0]
        proto = (folder / f"{case}-{tag}.hlo.pb").read_bytes()
        lowered[tag] = json.loads((folder / f"{case}-{tag}.json").read_text(encoding="utf-8"))
        result["departures"] += [f"{tag}: {s}" for s in departures(plan, graph, proto, lowered[tag])]
        result["graphs"][tag] = {"bytes": len(proto), "opcodes": opcodes(proto)}
    if case in RUN and not result["departures"]:
        result["tokens"] = run.compared(plan, folder, case, lowered)
    return result | {"wall_seconds": round(time.perf_counter() - begin, 1)}


def _lower(python: Path, case: str, tag: str, folder: Path) -> str:
    """Lower a graph in the environment of torch_xla; the message if it failed."""
    command = [str(python), "-m", "compile.neuron.xla_check.lower", case, tag, str(folder)]
    # our runtime's flags are those of a newer XLA
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environ |= {"PJRT_DEVICE": "CPU", "LD_PRELOAD": str(python.parents[1] / environment.SYMBOLS)}
    done = subprocess.run(command, cwd=environment.ROOT, env=environ, capture_output=True, text=True, check=False)
    said = (done.stderr.strip() or "nothing").splitlines()[-1]
    return f"{tag}: lowering ended with {done.returncode} and said: {said}" if done.returncode else ""


def main(arguments: list[str]) -> None:
    """Check the cases; exit 1 if one departs."""
    parser = argparse.ArgumentParser(prog="python -m compile.neuron.xla_check", description=__doc__)
    parser.add_argument("--env", type=Path, default=Path(".xla"), help="folder of the environment, made if absent")
    parser.add_argument("--out", type=Path, help="JSON file of the result, with its header")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--keep", type=Path, help="folder for the lowered graphs (default: none is kept)")
    options = parser.parse_args(arguments)
    python = environment.make(options.env.absolute())
    found, made_by = dict[str, Any](), header("wall")
    # a process makes its devices once
    devices_of("cpu", max(CASES[case].tp for case in RUN))
    with tempfile.TemporaryDirectory() as folder:
        for case in [options.only] if options.only else CASES:
            found[case] = check(case, python, options.keep or Path(folder))
            said = "; ".join(found[case]["departures"]) or "held"
            tokens = f", {found[case]['tokens']} tokens equal" if "tokens" in found[case] else ""
            print(f"{case}: {said}{tokens}", flush=True)
    if options.out:
        versions = {"torch": environment.TORCH, "torch_xla": environment.TORCH_XLA}
        text = json.dumps(made_by | {"versions": versions, "cases": found}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
        print(options.out)
    if failed := [case for case, result in found.items() if result["departures"]]:
        raise UserError(f"{', '.join(failed)} did not hold; read the lines above")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
