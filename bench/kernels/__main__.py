"""`python -m bench.kernels [--json] [--only TEXT]`: each kernel and case, simulated; `--explain` takes one apart.

Times are simulated by nkisim's timeline. Where the vendor's `nki` can be imported the same command also
measures on the device, and the simulated column comes from a second process; that half is untried.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.kernels.case import Case
from bench.kernels.cases import CASES
from bench.kernels.explain import explained, prompt_bound_ns, sums_ns
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each
from nkisim.timeline.drawing import draw
from nkisim.timeline.recording_file import save
from nkisim.timeline.schedule import hbm_peak, schedule
from nkisim.timeline.trn2 import TRN2

_BUSY = 0.05
# on a machine with the vendor's nki: this process has it, so nkisim takes the name in a different one
_SIMULATED_BY = (
    "import sys, nkisim.install as i; i.install(force=True); "
    "from bench.kernels.__main__ import main; main(sys.argv[1:])"
)


def simulate(case: Case, written: Path | None = None) -> dict[str, Any]:
    """Run a case once and read its timeline: one row of the table. `written` keeps the recording."""
    recording = case.recorded()
    if written:
        save(written, recording.events, {"kernel": case.full_name})
    result, cost = schedule(recording.events), case.cost()
    flops_per_ns = case.lnc * TRN2.tensor_bf16_tflops.value * 1e3
    roofline_ns = max(cost.hbm_bytes / hbm_peak(recording.events, TRN2), cost.flops / flops_per_ns)
    return {
        "case": case.full_name, "source": "simulated", "launch": "not included", "order": result.order,
        "chip": result.chip, "lnc": case.lnc,
        "us": result.latency_ns / 1e3, "us_low": result.low_ns / 1e3, "us_high": result.high_ns / 1e3,
        "us_likely_low": result.likely_low_ns / 1e3, "us_likely_high": result.likely_high_ns / 1e3,
        "hbm_bytes": cost.hbm_bytes, "moved_bytes": result.hbm_bytes, "flops": cost.flops,
        "roofline_us": roofline_ns / 1e3, "roofline_share": roofline_ns / result.latency_ns,
        "bytes_per_ns": cost.hbm_bytes / result.latency_ns,
        "busy": {k: v for k, v in result.busy_share.items() if v > _BUSY},
        "critical_us": {k: v / 1e3 for k, v in result.waits_ns.items()},
        "peak_bytes_per_partition": _peaks(recording.peaks), "instructions": recording.instructions,
    }  # fmt: skip


def has_device() -> bool:
    """Whether `nki` is the vendor's, whose kernels run on a NeuronCore."""
    return not getattr(sys.modules["nki"], "__nkisim__", False)


def simulate_elsewhere(case: Case) -> dict[str, Any]:
    """The simulated row of a case, from a process in which nkisim answers to the name nki (untried)."""
    command = [sys.executable, "-c", _SIMULATED_BY, "--json", "--only", case.full_name]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    row: dict[str, Any] = next(r for r in map(json.loads, lines) if r["case"] == case.full_name)
    return row


def _peaks(peaks: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for peak in peaks:
        found[peak.space] = max(found.get(peak.space, 0), peak.peak_bytes_per_partition)
    return found


def measure(case: Case, repeats: int = 20) -> float:
    """Median microseconds of a case on the device, the host's dispatch included (untried)."""
    arguments, times = case.arguments(), []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        case.kernel[case.lnc](*arguments)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as markdown; a measured column appears when a device gave one."""
    device = any("device_us" in row for row in rows)
    heads = ["case", "us (simulated, without a launch)", "band", "MB", "GFLOP", "share of roofline", "busy"]
    heads += ["SBUF KiB", "PSUM KiB"] + ["us (wall, device)"] * device
    lines = []
    for row in rows:
        peaks = row["peak_bytes_per_partition"]
        cells = [
            row["case"], f"{row['us']:.2f}", f"{row['us_low']:.2f} to {row['us_high']:.2f}",
            f"{row['hbm_bytes'] / 1e6:.2f}", f"{row['flops'] / 1e9:.3f}", f"{row['roofline_share']:.0%}",
            ", ".join(f"{name} {share:.0%}" for name, share in row["busy"].items()),
            f"{peaks.get('sbuf', 0) / 1024:.0f}", f"{peaks.get('psum', 0) / 1024:.0f}",
        ]  # fmt: skip
        lines.append(cells + [f"{row['device_us']:.2f}" if "device_us" in row else ""] * device)
    return markdown(heads, lines)


def explain(case: Case) -> str:
    """The critical path of a case by stage, and the bounds of collectives and of prompt attention."""
    events = case.recorded().events
    lines = [case.full_name, "", explained(events)]
    if case.ranks:
        lines += ["", f"No schedule of its sums over ranks takes less than {sums_ns(events) / 1e3:.2f} us (simulated)."]
    if case.dims:
        bound = prompt_bound_ns(case.dims, case.lnc)
        lines += ["", f"No order of steps takes less than {bound / 1e3:.2f} us (simulated)."]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON row per case."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print one JSON row per case")
    parser.add_argument("--recording", type=Path, help="write the events of the one chosen case, for nkisim.report")
    parser.add_argument("--picture", type=Path, help="draw the timeline of the one chosen case, SVG")
    parser.add_argument("--explain", action="store_true", help="the critical path of the one chosen case, by stage")
    options = parser.parse_args(arguments)
    exact = [case for case in CASES if options.only == case.full_name]
    chosen = exact or [case for case in CASES if options.only in case.full_name]
    if not chosen:
        raise UserError(f"no case contains {options.only!r}: {len(CASES)} cases exist, run without --only to see them")
    if (options.recording or options.explain or options.picture) and len(chosen) > 1:
        raise UserError(
            f"--recording, --picture and --explain take one case, {options.only!r} chooses {len(chosen)}: name one by "
            "--only"
        )
    if options.picture:
        events = chosen[0].recorded().events
        # ranks' cores look alike
        drawn = draw(events, schedule(events), 0 if chosen[0].ranks else None)
        options.picture.write_text(drawn, encoding="utf-8")
    if options.explain:
        print(explain(chosen[0]))
        return
    rows = []
    for case in each(chosen, "kernels, cases"):
        if has_device():
            rows.append({**simulate_elsewhere(case), "device_us": measure(case)})
        else:
            rows.append(simulate(case, options.recording))
        if options.json:
            print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
