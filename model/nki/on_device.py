"""Launches on a Trainium machine: the vendor's nki compiles the kernels and runs them on torch tensors. Untried.

Caches are given to the kernel and come back as they are: docs/device.md lists the check that the kernel's
writes are seen there.
"""

import sys

from torch import Tensor

from model.errors import UserError
from model.nki.launches import Launch, filled
from model.nki.table import KERNELS


def launch_on_device(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a launch on one logical NeuronCore, and the tensors that it changed.

    Raises:
        UserError: `nki` is the simulator: this machine has no NeuronCore to launch on.
    """
    if getattr(sys.modules["nki"], "__nkisim__", False):
        raise UserError(
            "nki is the simulator, a device launch needs the vendor's: run on a trn2 machine with the Neuron SDK, "
            "or let model.nki.simulated serve the launch"
        )
    found = KERNELS[launch.kernel][launch.lnc](*filled(launch.arguments, tensors))
    results = (found if isinstance(found, tuple) else (found,))[: len(launch.results)]
    return (*results, *(tensors[i] for i in launch.changed))
