"""Prompt attention beside the vendor's own kernel, simulated alike.

`attention_cte` of a checkout of nki-library runs unmodified: rows of two heads over a cached prefix and themselves. It
gets contiguous keys, turned beforehand; ours gets blocks and turns keys itself.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

import nkisim
from bench.kernels.case import Case, normal
from bench.kernels.cases import PROMPT_ATTENTION
from bench.table import markdown
from nkisim.accuracy.library import Library
from nkisim.event import Event
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2


def vendor_events(library: Library, count: int, slots: int, lnc: int) -> Sequence[Event]:
    """What attention_cte of a checkout does for `count` rows behind a prefix, two heads of one kv head, D 128."""
    prefix = slots - count
    arguments: dict[str, Any] = {"q": normal((2, count, 128), 2), "k": normal((1, 128, count), 2)}
    arguments |= {"v": normal((1, count, 128), 2), "scale": 1.0, "causal_mask": True}
    if prefix:
        arguments |= {"k_prior": normal((1, 128, prefix), 2), "v_prior": normal((1, prefix, 128), 2)}
        arguments["prior_used_len"] = np.array([prefix], np.int32)
    # the vendor's functions are jitted where they are launched
    kernel = sys.modules["nki"].jit(library.find("attention_cte"))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return nkisim.run(kernel[lnc], (), arguments, nkisim.Policy(recording=True, numerics=False)).recording.events


def _times(events: Sequence[Event], case: Case) -> list[str]:
    """Microseconds, and the share of the Tensor Engine's bound for the case's operations."""
    ns = schedule(events, band=False).latency_ns
    bound = case.cost().flops / (case.lnc * TRN2.tensor_bf16_tflops.value * 1e3)
    return [f"{ns / 1e3:.1f}", f"{bound / ns:.0%}"]


def prompts_beside(library: Library) -> str:
    """The table of prompt attention, two heads in bf16, markdown."""
    lines = []
    for case in PROMPT_ATTENTION:
        if case.dims and case.dims.itemsize == 2:
            theirs = vendor_events(library, case.dims.candidates, case.dims.slots, case.lnc)
            lines.append([case.full_name, *_times(case.recorded().events, case), *_times(theirs, case)])
    return markdown(["case", "us (simulated)", "share", "attention_cte, us (simulated)", "share"], lines)
