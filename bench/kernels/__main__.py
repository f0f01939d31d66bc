"""`python -m bench.kernels`: the time of each case of each kernel, simulated by nkisim.

With the vendor's `nki` the command also measures on the device, and the simulated column comes from a second process;
that part has run on no device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.kernels.case import Case
from bench.kernels.cases import CASES
from bench.kernels.explain import explained, prompt_bound_ns, sums_ns
from bench.options import output_file
from bench.table import markdown
from model.errors import UserError, command_line, run_cli
from model.progress import each
from nkisim.timeline.drawing import draw
from nkisim.timeline.schedule import hbm_peak, schedule
from nkisim.timeline.trn2 import TRN2

_BUSY = 0.05
# this process has the vendor's nki, so nkisim takes the name in another process
_SIMULATED_BY = (
    "import sys; from nkisim.install import install; install(force=True); "
    "from bench.kernels.__main__ import main; main(sys.argv[1:])"
)


def simulate(case: Case) -> dict[str, Any]:
    """Run a case once and schedule its events: one row of the table."""
    recording = case.recorded()
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
    """Whether `nki` is the vendor's."""
    return not getattr(sys.modules["nki"], "__nkisim__", False)


def simulate_elsewhere(case: Case) -> dict[str, Any]:
    """The simulated row of a case, from a process in which nkisim is imported as nki (not run on a device machine)."""
    command = [sys.executable, "-c", _SIMULATED_BY, "--json", "--only", case.full_name]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    row: dict[str, Any] = next(r for r in map(json.loads, lines) if r["case"] == case.full_name)
    return row


def _peaks(peaks: Any) -> dict[str, int]:
    largest: dict[str, int] = {}
    for peak in peaks:
        largest[peak.space] = max(largest.get(peak.space, 0), peak.peak_bytes_per_partition)
    return largest


def measure(case: Case, repeats: int = 20) -> float:
    """Median microseconds of a case on the device with the host's dispatch (has run on no device)."""
    arguments, times = case.arguments(), []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        case.kernel[case.lnc](*arguments)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as markdown, with a column of measured times if there are any."""
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
    """The critical path of a case by stage, and the lower bounds of collectives and of prompt attention."""
    events = case.recorded().events
    lines = [case.full_name, "", explained(events)]
    if case.ranks:
        lines += ["", f"Lower bound of its all-reduces in any schedule: {sums_ns(events) / 1e3:.2f} us (simulated)."]
    if case.dims:
        bound = prompt_bound_ns(case.dims, case.lnc)
        lines += ["", f"Lower bound of any order of its steps: {bound / 1e3:.2f} us (simulated)."]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON row per case."""
    about = "Simulate the kernels on Trainium2: time, uncertainty band, roofline share and memory of each case."
    parser = command_line("bench.kernels", about, "--only M32-B4-N8 --explain")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this text (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, simulate nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    single = parser.add_argument_group("for a single case")
    single.add_argument("--explain", action="store_true", help="print the critical path by stage of the kernel")
    single.add_argument("--picture", type=output_file, metavar="FILE", help="write the timeline as SVG")
    options = parser.parse_args(arguments)
    exact = [case for case in CASES if options.only == case.full_name]
    chosen = exact or [case for case in CASES if options.only in case.full_name]
    if not chosen:
        raise UserError(f"no case contains {options.only[:80]!r}; --list prints the names of all {len(CASES)}")
    if (options.explain or options.picture) and len(chosen) > 1:
        raise UserError(f"--explain and --picture take one case, not {len(chosen)}; name it by --only")
    if options.list:
        print("\n".join(case.full_name for case in chosen))
        return
    if options.picture:
        events = chosen[0].recorded().events
        # all ranks have the same timeline
        picture = draw(events, schedule(events), 0 if chosen[0].ranks else None)
        options.picture.write_text(picture, encoding="utf-8")
    if options.explain:
        print(explain(chosen[0]))
        return
    rows = []
    for case in each(chosen, "kernels, cases"):
        if has_device():
            rows.append({**simulate_elsewhere(case), "device_us": measure(case)})
        else:
            rows.append(simulate(case))
        if options.json:
            print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
