"""A CPU's devices: as many as a bundle has ranks, each with one thread of XLA's pool, or as many as JAX was told."""

import os
import subprocess
import sys

import pytest

# in a process of its own: devices are made once, and the tests' process has two
_COUNT = "import jax; from trnspec.runtime import pjrt; pjrt.devices_of('cpu', {}); print(len(jax.devices()))"


@pytest.mark.parametrize(("ranks", "told", "devices"), [(1, None, 1), (2, None, 2), (1, "2", 2)])
def test_a_process_has_a_device_for_each_rank(ranks: int, told: str | None, devices: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"JAX_NUM_CPU_DEVICES": told} if told else {}
    command = [sys.executable, "-c", _COUNT.format(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == devices
