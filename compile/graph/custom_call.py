"""Launches of NKI kernels in a graph: one custom call each, by the name that Trainium's compiler knows.

The call's configuration is the launch as text (`model/nki/launches.py`), which the CPU runtime reads to serve it. For a
device `compile/neuron/specialise.py` puts the vendor's in its place.
"""

import jax
import jax.numpy as jnp
from torch import Tensor

from compile.graph.torchax_seam import interop
from model.nki.launches import API_VERSION, TARGET, Launch, Result, to_text


def launch_in_graph(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The custom call of a launch, on torch tensors that represent JAX values."""

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        given = [Result(tuple(x.shape), str(x.dtype)) for x in operands]
        made = [jax.ShapeDtypeStruct(r.shape, jnp.dtype(r.dtype)) for r in launch.outputs(given)]
        text = to_text(launch, given)
        # what the kernel writes in place is the operand and the result
        aliases = {number: len(launch.results) + at for at, number in enumerate(launch.changed)}
        run = jax.ffi.ffi_call(
            TARGET, made, custom_call_api_version=API_VERSION, legacy_backend_config=text, input_output_aliases=aliases
        )
        return tuple(run(*operands))

    return tuple(interop.call_jax(call, *tensors))
