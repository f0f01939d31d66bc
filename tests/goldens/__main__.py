"""`python -m tests.goldens`: simulated times of every case of `bench.kernels` against the record of commit bc64a24.

Exit code 1 where a case in both is more than 1 % slower or faster. Ids, scores, plans and bits have their own tests.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("kernels.json.gz")
TOLERANCE = 0.01


def main() -> None:
    """Print the cases whose simulated time differs, that are gone, that are new."""
    run = [sys.executable, "-m", "bench.kernels", "--json"]
    lines = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    new = {row["case"]: row["us"] for row in map(json.loads, lines)}
    # in the record verify_attention_kernel is the contiguous kernel, which is gone: its paged kernel has the name now
    now, record = "verify_attention_kernel", json.loads(gzip.decompress(RECORD.read_bytes()))
    old = {c.replace("verify_attention_paged_kernel", now): us for c, us in record.items() if not c.startswith(now)}
    changes = {case: new[case] / us - 1 for case, us in old.items() if case in new}
    beyond = sum(abs(change) > TOLERANCE for change in changes.values())
    print(f"{len(old)} cases before, {len(new)} after, {len(changes)} in both, {beyond} beyond {TOLERANCE:.0%}")
    for case in (*old, *(new.keys() - old.keys())):
        if case not in changes:
            print(f"{'gone' if case in old else 'new'}: {case}")
        elif changes[case]:
            print(f"{case}: {old[case]:.3f} -> {new[case]:.3f} us, {changes[case]:+.2%}")
    raise SystemExit(bool(beyond))


if __name__ == "__main__":
    main()
