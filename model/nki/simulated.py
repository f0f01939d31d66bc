"""Runs launches with nkisim on NumPy arrays or torch tensors; the model's only use of the simulator."""

from functools import partial

import nkisim
from model.nki.table import run, run_on_tensors

simulate, serve = partial(run, runner=nkisim.simulate), partial(run_on_tensors, runner=nkisim.simulate)
