"""`python -m bench.pictures`: writes the pictures of README and docs to docs/pictures (a few seconds).

loop, bundle and floors are diagrams; timeline is the simulated schedule of verification attention.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nkisim
from bench.kernels.cases import CASES
from bench.pictures import diagrams
from model.errors import run_cli
from nkisim.timeline.drawing import draw
from nkisim.timeline.schedule import schedule

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
# the kernel whose timeline is shown
SHOWN = "verify_attention_kernel/B4-H2-G1-S1024-N8-D128-bf16"


def timeline() -> str:
    """The simulated timeline of one kernel and case of bench.kernels."""
    case = next(c for c in CASES if c.full_name == SHOWN)
    recording = nkisim.run(case.kernel[case.lnc], case.arguments(), policy=nkisim.Policy(recording=True)).recording
    return draw(recording.events, schedule(recording.events))


PICTURES = {
    "loop.svg": diagrams.loop,
    "bundle.svg": diagrams.bundle,
    "floors.svg": diagrams.floors,
    "timeline.svg": timeline,
}


def main(arguments: list[str]) -> None:
    """Write every picture, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.pictures", description=__doc__)
    parser.add_argument("--only", choices=sorted(PICTURES), action="append", help="may be repeated (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or PICTURES:
        (options.out / name).write_text(PICTURES[name](), encoding="utf-8")
        print(options.out / name)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
