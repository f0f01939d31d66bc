"""`python -m bench.kernels.device {run,time} CASE FOLDER`: the device time of a case by nrtpy's benchmark.

nki and nrtpy may be in two environments: `run` needs the Python with nki and leaves a NEFF in the folder, `time` needs
the one with nrtpy. The last line is a JSON object. It has run on no device.
"""

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, command_line, run_cli

# microseconds of an execution, and the largest plausible multiple of a simulated time's upper end
_LAUNCH_US, _MAX_RATIO = 15, 3


def run(case: str, folder: Path) -> dict[str, Any]:
    """Run a case with nki; leaves its simulated row and its NEFF in the folder."""
    # read when nki is imported; source: AWS's tutorial "Test and debug a NKI kernel end-to-end with nrtpy"
    os.environ["NKI_ARTIFACTS_DIR"] = str(folder)
    kernels, cases = (importlib.import_module(f"bench.kernels.{name}") for name in ("__main__", "cases"))
    chosen = next((c for c in cases.CASES if c.full_name == case), None)
    if chosen is None:
        raise UserError(f"{case[:80]!r} is not a case; python -m bench.kernels --list prints the names")
    row = kernels.simulate_elsewhere(chosen) | {"device_us": kernels.measure(chosen)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    if len(neffs := list(folder.rglob("*.neff"))) != 1:
        raise UserError(f"nki left {len(neffs)} NEFFs in {folder}, and one is expected")
    return {"us with the host's dispatch": row["device_us"]}


def time(case: str, folder: Path) -> dict[str, Any]:
    """Benchmark a case's NEFF on zeros; UserError for a time below its roofline or far above nkisim's."""
    row, nrtpy = json.loads((folder / "row.json").read_text(encoding="utf-8")), importlib.import_module("nrtpy")
    model = nrtpy.NrtpyModel.load_from_neff(next(folder.rglob("*.neff")))
    inputs = {name: nrtpy.NrtpyTensor.from_numpy(_zeros(info)) for name, info in model.input_tensors_info.items()}
    us = 1e3 * model.benchmark(inputs, warmup_iter=10, benchmark_iter=100, mode="device").mean_ms
    low, high = row["roofline_us"], _LAUNCH_US + _MAX_RATIO * row["us_high"]
    if not low <= us <= high:
        raise UserError(f"{us:.1f} us on the device, and {low:.1f} to {high:.1f} are plausible")
    return {"us (device)": us, "us (simulated)": row["us"]}


def _zeros(info: Any) -> np.ndarray:
    # nrtpy documents shape and size only; spike, its predecessor, has the dtype and compares it
    return np.zeros(info.shape, getattr(info, "dtype", f"u{info.size // math.prod(info.shape)}"))


def main(arguments: list[str]) -> None:
    """Print the result, JSON."""
    about = "Measure a case of bench.kernels on a device: first run it with nki, then time its NEFF with nrtpy."
    parser = command_line("bench.kernels.device", about, "run accept_drafts_kernel/M32-B4-N8 /tmp/accept")
    parser.add_argument("action", choices=("run", "time"), help="run needs nki, time needs nrtpy")
    parser.add_argument("case", metavar="CASE", help="full name of a case: python -m bench.kernels --list")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the NEFF and the simulated row")
    options = parser.parse_args(arguments)
    print(json.dumps({"run": run, "time": time}[options.action](options.case, options.folder)))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
