"""Packages that only a Trainium machine has, for tests: their names, and none of their hardware."""

from pathlib import Path

# where a process of a test finds them
FOLDER = Path(__file__).parent / "packages"
