"""`python -m tests.budgets`: lines of Python per package and budgets.toml; exit 1 if one exceeds its budget by 5 %."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1.05


def lines(paths: list[str], without: list[str]) -> int:
    """Lines of all Python files that git tracks below `paths` and not below `without`."""
    patterns = [f"{path}/**/*.py" for path in paths] + [f"{path}/*.py" for path in paths]
    listed = ["git", "ls-files", "--", *(f":(glob){pattern}" for pattern in patterns)]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    excluded = tuple(f"{path}/" for path in without)
    counted = (ROOT / file for file in set(files) if not file.startswith(excluded))
    return sum(file.read_bytes().count(b"\n") for file in counted if file.exists())


def main() -> None:
    """Print a row for each package."""
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))["lines"]
    exceeded = False
    for name, budget in budgets.items():
        count = lines(budget["paths"], budget.get("without", []))
        over = count > TOLERANCE * budget["max"]
        exceeded |= over
        print(f"{name:16} {count:6} of {budget['max']:6}{'  exceeded' if over else ''}")
    sys.exit(int(exceeded))


if __name__ == "__main__":
    main()
