"""The two orders of a program, and the laws that published measurements corrected: small event lists, known answers."""

from __future__ import annotations

import pytest

from nkisim.event import Event, Extent
from nkisim.timeline.pipelining import pipelined
from nkisim.timeline.program import prepare
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.timeline.trn2 import TRN2
from validation.instruction_models import EventBuilder

N = TRN2.at("nominal")


def run(tape: EventBuilder) -> Schedule:
    return schedule(tape.events, band=False)


def vector(tape: EventBuilder, src: Extent, dst: Extent, **work: object) -> Event:
    return tape.add("vector", "tensor_copy", (src,), (dst,), elements=512, **work)


def sbuf(tape: EventBuilder, count: int = 512) -> Extent:
    return tape.tile("sbuf", count)


def test_the_compiler_runs_what_is_ready_before_what_waits() -> None:
    tape = EventBuilder()
    loaded, free = sbuf(tape), sbuf(tape)
    tape.transfer(tape.tile("hbm", 512), loaded)
    vector(tape, loaded, sbuf(tape))
    vector(tape, free, sbuf(tape))
    s = run(tape)
    assert s.start[2] == 0.0
    assert s.pipelined_ns < s.program_order_ns
    assert s.latency_ns == s.pipelined_ns


def test_the_compiler_sees_a_window_only() -> None:
    def first_free(between: int) -> float:
        tape = EventBuilder()
        loaded = sbuf(tape)
        tape.transfer(tape.tile("hbm", 512), loaded)
        for _ in range(between):
            vector(tape, loaded, sbuf(tape))
        vector(tape, sbuf(tape), sbuf(tape))
        return run(tape).start[-1]

    assert first_free(int(N.compiler_window) - 10) == 0.0
    assert first_free(int(N.compiler_window) + 10) > 0.0


def test_loads_go_in_the_order_of_first_use() -> None:
    tape = EventBuilder()
    late, soon = sbuf(tape), sbuf(tape)
    tape.transfer(tape.tile("hbm", 512), late)
    tape.transfer(tape.tile("hbm", 512), soon)
    vector(tape, soon, sbuf(tape))
    vector(tape, late, sbuf(tape))
    program = prepare(tape.events, TRN2, ("nominal",))
    loads = program.lane_of[0]
    assert program.queues[loads] == [0, 1]
    assert pipelined(program, N).queues[loads] == [1, 0]


def test_copies_without_an_engine_go_to_the_less_loaded_one() -> None:
    def copies(**work: object) -> Schedule:
        tape = EventBuilder()
        for _ in range(12):
            vector(tape, tape.tile("psum", 512), sbuf(tape), **work)
        return run(tape)

    spread, bound = copies(engine="unknown"), copies()
    assert {spread.lanes[lane] for lane in spread.lane_of} == {"core 0 vector", "core 0 scalar"}
    assert {bound.lanes[lane] for lane in bound.lane_of} == {"core 0 vector"}
    assert spread.latency_ns < 0.65 * bound.latency_ns


def test_an_engine_overwrites_its_result_without_waiting() -> None:
    tape = EventBuilder()
    a, b, c = sbuf(tape), sbuf(tape), sbuf(tape)
    vector(tape, a, c)
    vector(tape, b, c)
    vector(tape, c, a)
    s = run(tape)
    stream = 512 / 2 / 0.96
    assert s.start[1] - s.start[0] == pytest.approx(stream + N.vector_gap_ns)
    # negative control: reading the result waits for it
    assert s.start[2] - s.start[1] == pytest.approx(stream + N.vector_latency_ns)


def test_an_instruction_that_reads_what_it_overwrites_waits() -> None:
    tape = EventBuilder()
    total = sbuf(tape)
    for _ in range(2):
        tape.add("vector", "tensor_tensor", (total, sbuf(tape)), (total,), elements=512)
    s = run(tape)
    assert s.start[1] - s.start[0] == pytest.approx(512 / 0.96 + N.vector_latency_ns)


def products(rows: list[int], columns: int = 512, band: bool = False) -> Schedule:
    """Products of bf16 tiles, one for each number of rows."""
    tape = EventBuilder()
    for count in rows:
        reads = tape.tile("sbuf", 128, "bfloat16"), tape.tile("sbuf", columns, "bfloat16")
        sizes = {"rows": count, "cols_stationary": 128, "cols_moving": columns}
        tape.add("tensor", "nc_matmul", reads, (tape.tile("psum", columns),), fp32=False, **sizes)
    return schedule(tape.events, band=band)


FULL = (512 + 7) / 2.4


@pytest.mark.parametrize(
    ("rows", "warm"),
    # once warm, products over 64 rows stay fast
    [([1] * 60, False), ([64] * 60, False), ([80] * 60, False), ([96] * 60, True), ([128] * 20 + [64] * 40, True)],
    ids=["1", "64", "80", "96", "128, then 64"],
)
def test_the_throttle_counts_rows(rows: list[int], warm: bool) -> None:
    s = products(rows)
    assert s.free[-1] - s.free[-2] == pytest.approx(FULL if warm else 2 * FULL)


@pytest.mark.parametrize(("rows", "both"), [(16, False), (48, True), (64, True), (128, False)])
def test_the_band_spans_both_clocks_for_33_to_64_rows_only(rows: int, both: bool) -> None:
    s = products([rows] * 100, band=True)
    assert (s.low_ns / s.latency_ns < 0.6) == both
    # after wider ones they stay fast at the nominal end, and at the slow end only above 64 rows
    after = products([128] * 20 + [rows] * 100, band=True)
    assert (after.high_ns / after.latency_ns > 1.6) == (rows == 64)
    assert (s.low_ns / s.latency_ns > 0.8) == (not both)


@pytest.mark.parametrize(("columns", "rate"), [([0], "tensor_tiled_rate"), ([0, 32, 64, 96], "tensor_rotated_rate")])
def test_products_in_parts_of_the_columns_overlap(columns: list[int], rate: str) -> None:
    tape = EventBuilder()
    for i in range(60):
        reads = tape.tile("sbuf", 32, "bfloat16"), tape.tile("sbuf", 512, "bfloat16")
        sizes = {"rows": 128, "cols_stationary": 32, "cols_moving": 512}
        place = {"tile_position": (0, columns[i % len(columns)]), "tile_size": (128, 32)}
        tape.add("tensor", "nc_matmul", reads, (tape.tile("psum", 512),), fp32=False, **sizes, **place)
    s = run(tape)
    assert s.free[-1] - s.free[-2] == pytest.approx(FULL / getattr(N, rate))


def test_the_band_spans_both_orders_and_what_is_not_modelled() -> None:
    tape = EventBuilder()
    loaded = sbuf(tape)
    tape.transfer(tape.tile("hbm", 512), loaded)
    vector(tape, loaded, sbuf(tape))
    for _ in range(30):
        vector(tape, sbuf(tape), sbuf(tape))
    s = schedule(tape.events)
    assert s.low_ns < s.pipelined_ns < s.program_order_ns < s.high_ns
