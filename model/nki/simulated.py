"""Launches served by nkisim, on numpy arrays or torch tensors: the only file of the model that runs the simulator."""

from functools import partial

import nkisim
from model.nki.table import run, run_on_tensors

simulate, serve = partial(run, runner=nkisim.simulate), partial(run_on_tensors, runner=nkisim.simulate)
