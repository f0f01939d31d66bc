"""Recordings of real launches on one and two cores go through the timeline."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from nkisim import launch
from nkisim.event import Event
from nkisim.policy import STRICT
from nkisim.timeline.schedule import schedule

nisa: Any = import_module("nkisim.isa")
nl: Any = import_module("nkisim.language")
RECORDED = replace(STRICT, recording=True)


def matmul(a: Any, b: Any) -> Any:
    """Tiled a.T @ b, fresh tiles in every step."""
    rows, columns = a.shape[1], b.shape[1]
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in range(rows // 128):
        product = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.psum)
        for k in range(a.shape[0] // 128):
            left = nl.ndarray((128, 128), dtype=a.dtype, buffer=nl.sbuf)
            right = nl.ndarray((128, columns), dtype=a.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=left, src=a[k * 128 : (k + 1) * 128, m * 128 : (m + 1) * 128])
            nisa.dma_copy(dst=right, src=b[k * 128 : (k + 1) * 128, :])
            nisa.nc_matmul(dst=product, stationary=left, moving=right)
        tile = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=product)
        nisa.dma_copy(dst=out[m * 128 : (m + 1) * 128, :], src=tile)
    return out


def exchange(a: Any) -> Any:
    """Both cores add the other core's tile; core 0 stores."""
    core = nl.program_id(0)
    out = nl.ndarray((128, 512), dtype=a.dtype, buffer=nl.shared_hbm)
    mine = nl.ndarray((128, 512), dtype=a.dtype, buffer=nl.sbuf)
    other = nl.ndarray((128, 512), dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=mine, src=a[core * 128 : (core + 1) * 128, :])
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=other, op=nl.add)
    if core == 0:
        nisa.dma_copy(dst=out, src=mine)
    nisa.core_barrier(out, cores=(0, 1))
    return out


def events_of(kernel: Any, *arrays: Any) -> list[Event]:
    return launch.run(kernel, arrays, policy=RECORDED).recording.events


def test_matmul_moves_its_bytes_and_respects_its_data() -> None:
    a, b = np.ones((256, 256), np.float32), np.ones((256, 512), np.float32)
    events = events_of(matmul, a, b)
    s = schedule(events)
    loads = 2 * 2 * (128 * 128 + 128 * 512) * 4
    assert s.hbm_bytes == loads + 256 * 512 * 4
    assert s.flops == 2 * 256 * 256 * 512
    assert s.low_ns <= s.latency_ns <= s.high_ns
    assert sum(s.waits_ns.values()) == pytest.approx(s.latency_ns)
    for i, event in enumerate(events):
        if event.op == "nc_matmul":
            assert s.start[i] >= s.end[i - 1]


def test_cores_wait_for_each_other() -> None:
    events = events_of(launch.Kernel(exchange)[2], np.ones((256, 512), np.float32))
    s = schedule(events)
    where = {(event.core, event.op): i for i, event in enumerate(events) if event.op != "dma_copy"}
    loads = [i for i, event in enumerate(events) if event.op == "dma_copy"]
    for core in (0, 1):
        assert s.start[where[core, "sendrecv"]] >= max(s.end[loads[0]], s.end[loads[-1]])
        assert s.start[where[core, "core_barrier"]] >= s.end[loads[1]]
