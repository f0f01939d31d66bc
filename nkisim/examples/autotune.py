"""Choose an argument of a kernel by simulated time: one `nkisim time --json` for each value.

    python examples/autotune.py

A difference smaller than the likely bands is no reason to choose: run the candidates on a device.
"""

import json
import subprocess
import sys
from pathlib import Path

KERNEL = f"{Path(__file__).with_name('matmul.py')}:matmul"
SHAPES = ("bfloat16:512x256", "bfloat16:512x1024")
WIDTHS = (128, 256, 512)


def simulated(width):
    """The times of the product with one width, as `nkisim time --json` prints them; nanoseconds."""
    command = [sys.executable, "-m", "nkisim", "time", KERNEL, *SHAPES, f"width={width}", "--no-numerics", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(printed)["times"][0]


def main():
    """Print every width with its time, then the fastest."""
    times = {width: simulated(width) for width in WIDTHS}
    for width, row in times.items():
        us, low, high = (row[key] / 1e3 for key in ("latency_ns", "likely_low_ns", "likely_high_ns"))
        print(f"width {width}: {us:.2f} us simulated, without a launch (likely {low:.2f} to {high:.2f} us)")
    print(f"fastest: width {min(times, key=lambda width: times[width]['latency_ns'])}")


if __name__ == "__main__":
    main()
