"""`python -m compile.device_check.rank`: one rank of a probe on its core, by nrtpy; `probes.py` starts it."""

import importlib
import sys
from multiprocessing.connection import Connection

import numpy as np

from model.errors import UserError
from trnspec.runtime.ranks import serve


def run(neff: str, inputs: list[np.ndarray], expected: np.ndarray) -> None:
    """Run a NEFF of one fp32 input and one output twice; UserError if a result is not the expected one."""
    # vendor seam
    rank, nrtpy = int(sys.argv[2]), importlib.import_module("nrtpy")
    model = nrtpy.NrtpyModel.load_from_neff(neff, cc_enabled=True, rank_id=rank, world_size=len(inputs))
    (given,), (result,) = model.input_tensors_info, model.output_tensors_info
    x, y = (nrtpy.NrtpyTensor.from_numpy(array) for array in (inputs[rank], np.zeros_like(expected)))
    for number in (1, 2):
        model({given: x}, {result: y})
        actual = y.numpy().view(np.float32)
        if wrong := int((actual != expected).sum()):
            raise UserError(f"has {wrong} of {actual.size} wrong numbers in run {number}, first {actual[0, :2]}")


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), lambda: sys.modules[__name__])
