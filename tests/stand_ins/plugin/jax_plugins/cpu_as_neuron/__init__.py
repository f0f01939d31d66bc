"""A real PJRT plugin, one for CPUs, under the name `neuron`, as libneuronxla registers one; it has four devices."""

import lammps_jax_pjrt_cpu
from jax._src import xla_bridge


def initialize() -> None:
    # JAX's CPU backend stays the default
    xla_bridge.register_plugin("neuron", priority=-1, library_path=str(lammps_jax_pjrt_cpu.PLUGIN_PATH))
