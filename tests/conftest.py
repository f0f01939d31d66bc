"""Two CPU devices for every test process, made before anything traces."""

import jax

import model.runtime  # noqa: F401  (sets what XLA reads at its start)

jax.config.update("jax_num_cpu_devices", 2)
