"""`python -m bench.kernels.device {run,time} CASE FOLDER`: the device time of a case by nrtpy's benchmark.

nki and nrtpy may not share an environment: `run` is for the Python with nki, whose NEFF it keeps in the folder, `time`
for the one with nrtpy. The last line is a JSON object (untried).
"""

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, run_cli

# microseconds of an execution, and the largest multiple of a simulated time's upper end that is no fault
_LAUNCH_US, _MOST = 15, 3


def run(case: str, folder: Path) -> dict[str, Any]:
    """Run a case by nki; its row and its NEFF stay in the folder."""
    # read when nki is imported; source: AWS's tutorial "Test and debug a NKI kernel end-to-end with nrtpy"
    os.environ["NKI_ARTIFACTS_DIR"] = str(folder)
    kernels, cases = (importlib.import_module(f"bench.kernels.{name}") for name in ("__main__", "cases"))
    (chosen,) = (c for c in cases.CASES if c.full_name == case)
    row = kernels.simulate_elsewhere(chosen) | {"device_us": kernels.measure(chosen)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    if len(found := list(folder.rglob("*.neff"))) != 1:
        raise UserError(f"nki left {len(found)} NEFFs in {folder}, and one is expected")
    return {"us with the host's dispatch": row["device_us"]}


def time(case: str, folder: Path) -> dict[str, Any]:
    """Benchmark a case's NEFF on zeros; UserError for a time below its roofline or far above nkisim's."""
    row, nrtpy = json.loads((folder / "row.json").read_text(encoding="utf-8")), importlib.import_module("nrtpy")
    model = nrtpy.NrtpyModel.load_from_neff(next(folder.rglob("*.neff")))
    inputs = {name: nrtpy.NrtpyTensor.from_numpy(_zeros(info)) for name, info in model.input_tensors_info.items()}
    us = 1e3 * model.benchmark(inputs, warmup_iter=10, benchmark_iter=100, mode="device").mean_ms
    low, high = row["roofline_us"], _LAUNCH_US + _MOST * row["us_high"]
    if not low <= us <= high:
        raise UserError(f"{us:.1f} us on the device, and {low:.1f} to {high:.1f} are plausible")
    return {"us (device)": us, "us (simulated)": row["us"]}


def _zeros(info: Any) -> np.ndarray:
    # documented are shape and size; spike, nrtpy's ancestor, has the dtype and compares it
    return np.zeros(info.shape, getattr(info, "dtype", f"u{info.size // math.prod(info.shape)}"))


if __name__ == "__main__":
    run_cli(lambda: print(json.dumps({"run": run, "time": time}[sys.argv[1]](sys.argv[2], Path(sys.argv[3])))))
