"""Packages that only a Trainium machine has, for tests: their names, and none of their hardware."""

from pathlib import Path

# where a process of a test finds nrtpy, and a plugin of JAX's that is called neuron
PACKAGES, PLUGIN = (Path(__file__).parent / name for name in ("packages", "plugin"))
