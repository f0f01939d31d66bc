"""Simulated times of verification attention: the aims that it reaches, and what must not cost time."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from nki_kernels.attention.host import Candidates, verify_attention

from nki_kernels import roofline
from nki_kernels.roofline import AttentionDims
from nkisim.timeline.schedule import hbm_peak, schedule
from nkisim.timeline.trn2 import TRN2
from tests.nki_kernels.attention.inputs import Dims, draw, pooled
from tests.nki_kernels.recorded import events_of


class Launch(NamedTuple):
    """B 4, H 2, G 1, D 128, bf16: slots, candidates, and what differs from one core's chain."""

    slots: int
    candidates: int = 8
    lnc: int = 1
    tree: bool = False
    paged: bool = False


class Time(NamedTuple):
    """Microseconds, and the share of the roofline that they are."""

    us: float
    share: float


@cache
def timed(launch: Launch) -> Time:
    """The launch's simulated time."""
    dims = Dims(4, 2, 1, launch.candidates, launch.slots, 128, "bf16")
    x = draw(dims, first=[launch.slots - launch.candidates] * 4)
    cached, table, ancestors = x.fresh(), None, None
    if launch.paged:
        cached, table = pooled(x.keys.swapaxes(2, 3), x.values)
    if launch.tree:
        ancestors = np.tile((1 | 1 << np.arange(launch.candidates)).astype(np.int32), (4, 1))
    rows = Candidates(x.positions, ancestors, table)
    events = events_of(verify_attention, x.q, x.new, cached, rows, lnc=launch.lnc)
    cost = roofline.verify_attention(AttentionDims(4, 2, 1, launch.candidates, launch.slots, 128, 2))
    ns = schedule(events).latency_ns
    return Time(ns / 1e3, cost.hbm_bytes / hbm_peak(events, TRN2) / ns)


@pytest.mark.parametrize(
    ("launch", "share"),
    [
        (Launch(1024), 0.39),
        (Launch(1024, lnc=2), 0.27),
        (Launch(8192), 0.80),
        (Launch(8192, 16), 0.79),
        (Launch(8192, tree=True), 0.80),
        (Launch(8192, lnc=2), 0.80),
        (Launch(8192, paged=True), 0.60),
    ],
    ids=str,
)
def test_share_of_the_roofline(launch: Launch, share: float) -> None:
    assert share <= timed(launch).share <= 1


@pytest.mark.parametrize("slots", [1024, 8192])
def test_candidates_are_nearly_free(slots: int) -> None:
    """16 rows per sequence take at most a twentieth longer than one."""
    one, many = (timed(Launch(slots, count)).us for count in (1, 16))
    assert one < many <= 1.05 * one


def test_more_slots_take_longer() -> None:
    """Negative control: the times are those of the work, not a constant."""
    assert timed(Launch(8192)).us > 2 * timed(Launch(1024)).us
