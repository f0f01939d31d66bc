"""A child of test_ids.py: builds the demo bundle, and prints what torch computes with."""

from __future__ import annotations

import json
import sys

import torch

from trnspec import BuildSpec, build


def main(out: str) -> None:
    """Build into a folder; print one JSON object."""
    target, draft = "demo/target", "demo/draft"
    spec = BuildSpec(target, draft, tp=1, k="2", batch=1, max_len=128, dtype="fp32", out=out)
    spec.check()
    build(spec)
    print(json.dumps({"torch": torch.backends.cpu.get_cpu_capability()}))


if __name__ == "__main__":
    main(sys.argv[1])
