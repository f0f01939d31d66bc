"""Each cost law against its formula, and refusals of operations without one."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import harness
import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import isa
from nkisim.errors import NotSimulated
from nkisim.timeline.costs.dma import TRANSFERS, collective_ns, dma_cost, hbm_bytes
from nkisim.timeline.costs.engines import MatmulCost, matmul, scalar, vector
from nkisim.timeline.costs.table import ANYWHERE, LAWS, law_of
from nkisim.timeline.trn2 import TRN2
from validation.instruction_models import EventBuilder

N = TRN2.at("nominal")


def cost_of(engine: str, op: str, spaces: str, dtypes: str = "", count: int = 960, **work: object) -> Any:
    """The cost of one instruction; the last tile is its output. Missing dtypes are float32."""
    tape, names = EventBuilder(), spaces.split()
    kinds = dtypes.split() or ["float32"] * len(names)
    tiles = [tape.tile(space, count, kind) for space, kind in zip(names, kinds, strict=True)]
    event = tape.add(engine, op, tuple(tiles[:-1]), (tiles[-1],), elements=count, **work)
    return law_of(engine, op)(event, N)


@pytest.mark.parametrize(
    ("op", "spaces", "dtypes", "pointers", "rate"),
    [
        ("tensor_copy", "sbuf sbuf", "bfloat16 bfloat16", 0, 4),
        ("tensor_copy", "sbuf sbuf", "float32 float32", 0, 2),
        ("tensor_copy", "psum sbuf", "bfloat16 bfloat16", 0, 2),
        ("tensor_copy", "psum sbuf", "float32 float32", 0, 1),
        ("tensor_tensor", "sbuf sbuf sbuf", "bfloat16 bfloat16 bfloat16", 0, 2),
        ("tensor_tensor", "sbuf psum sbuf", "bfloat16 bfloat16 bfloat16", 0, 1),
        ("tensor_tensor", "sbuf sbuf sbuf", "float32 float32 float32", 0, 1),
        ("tensor_reduce", "sbuf sbuf", "bfloat16 bfloat16", 0, 1),
        ("memset", "sbuf", "bfloat16", 0, 1),
        ("reciprocal", "sbuf sbuf", "float32 float32", 0, 1 / 8),
        # eight bytes a cycle are read, four for each (P, 1) operand
        ("tensor_scalar", "sbuf sbuf", "bfloat16 bfloat16", 0, 4),
        ("tensor_scalar", "sbuf sbuf", "bfloat16 bfloat16", 1, 2),
        ("tensor_scalar", "sbuf sbuf", "bfloat16 bfloat16", 2, 1),
        ("tensor_scalar", "sbuf sbuf", "bfloat16 float8_e4m3", 1, 2),
        ("tensor_scalar", "sbuf sbuf", "float32 float32", 1, 1),
    ],
)
def test_elements_per_cycle_of_the_vector_engine(op: str, spaces: str, dtypes: str, pointers: int, rate: float) -> None:
    stream = cost_of("vector", op, spaces, dtypes, scalar_operands=pointers).stream
    assert stream == pytest.approx(960 / rate / N.vector_ghz)


def test_rows_apart_and_strides_halve_the_rate() -> None:
    tape = EventBuilder()
    dense, result = tape.tile("sbuf", 480), tape.tile("sbuf", 480)
    rows = replace(dense, row_bytes=64)
    low = dense.span[0]
    strided = replace(dense, span=(low, low + 479 * 16 + 4), row_bytes=4)
    for op, source, target, rate in (("tensor_copy", rows, result, 1), ("tensor_reduce", strided, result, 0.5)):
        event = tape.add("vector", op, (source,), (target,), elements=480)
        assert vector(event, N).stream == pytest.approx(480 / rate / N.vector_ghz)


def test_vector_pitch_has_a_minimum_of_64_cycles() -> None:
    cost = cost_of("vector", "tensor_copy", "sbuf sbuf", count=1)
    assert cost.pitch == pytest.approx(max(64 / 0.96, 1 / 2 / 0.96 + N.vector_gap_ns))
    pointed = cost_of("vector", "tensor_scalar", "sbuf sbuf", count=1, scalar_operands=1)
    assert pointed.latency == pytest.approx(pointed.stream + N.vector_latency_ns + N.vector_pointer_ns, abs=1e-9)


def test_a_scan_takes_longer_where_it_casts() -> None:
    for dtype, more in (("float32", 0.0), ("bfloat16", N.vector_scan_cast_cycles)):
        cost = cost_of("vector", "tensor_tensor_scan", "sbuf sbuf sbuf", f"float32 {dtype} float32")
        assert cost.stream == pytest.approx((N.vector_scan_cycles + more) * 960 / N.vector_ghz)


@pytest.mark.parametrize("op", ["max8", "nc_find_index8", "nc_match_replace8"])
def test_searches_for_eight_read_them_out(op: str) -> None:
    result, plain = (cost_of("vector", name, "sbuf sbuf", count=96) for name in (op, "tensor_reduce"))
    assert result.latency - plain.latency == result.pitch - plain.pitch == pytest.approx(N.vector_eight_ns)


def test_weights_that_are_apart_in_memory_load_slowly() -> None:
    tape = EventBuilder()
    dense, moving = tape.tile("sbuf", 128, "bfloat16"), tape.tile("sbuf", 16, "bfloat16")
    apart = replace(dense, span=(dense.span[0], dense.span[0] + 127 * 32 + 2), row_bytes=2)
    sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": 16}
    for weights, rate in ((dense, N.tensor_load_columns_per_cycle), (apart, N.tensor_strided_columns_per_cycle)):
        event = tape.add("tensor", "nc_matmul", (weights, moving), (tape.tile("psum", 16),), fp32=False, **sizes)
        assert matmul(event, N).load == pytest.approx(128 / rate / N.tensor_ghz)


def test_scalar_reads_its_sums_in_64_cycles_more() -> None:
    tape = EventBuilder()
    tile, total = tape.tile("sbuf", 120), tape.tile("sbuf", 1)
    plain = tape.add("scalar", "activation", (tile,), (tile,), elements=120, function="copy")
    summed = tape.add("scalar", "activation", (tile,), (tile, total), elements=120, function="copy")
    assert scalar(plain, N).latency == pytest.approx(100 + N.scalar_latency_ns)
    assert scalar(plain, N).pitch == pytest.approx(100 + N.scalar_gap_ns)
    assert scalar(summed, N).latency == pytest.approx(100 + N.scalar_latency_ns + 64 / 1.2)


def test_only_activation_functions_need_a_table() -> None:
    for op, function, table in (("activation", "exp", "exp"), ("activation", "copy", ""), ("tensor_copy", "x", "")):
        assert cost_of("scalar", op, "sbuf sbuf", function=function).table == table


def matmul_of(**work: object) -> MatmulCost:
    tape = EventBuilder()
    tiles = tape.tile("sbuf", 128), tape.tile("sbuf", 512)
    event = tape.add("tensor", "nc_matmul", tiles, (tape.tile("psum", 512),), **work)
    return matmul(event, N)


def test_matmul_cycles() -> None:
    sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": 512}
    bf16, fp32 = matmul_of(**sizes, fp32=False), matmul_of(**sizes, fp32=True)
    assert (bf16.passes, fp32.passes) == (1, 2)
    assert bf16.stream == pytest.approx((512 + 7) / 2.4)
    assert fp32.stream == pytest.approx((1024 + 7) / 2.4)
    assert bf16.load == pytest.approx(32 / 2.4)
    assert bf16.flops == 2 * 128 * 128 * 512
    short = matmul_of(**{**sizes, "cols_moving": 8}, fp32=False)
    assert short.stream == pytest.approx((64 + 7) / 2.4)


def test_fp32_transpose_is_twice_as_fast_as_a_matmul() -> None:
    sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": 512, "dtype": "float32"}
    transposed = matmul_of(**sizes, fp32=False, transpose=True)
    assert (transposed.passes, transposed.flops) == (1, 0.0)
    assert transposed.stream == pytest.approx((1024 + 7) / 2.4)


def test_double_row_does_twice_the_work_in_the_same_time() -> None:
    sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": 512, "fp32": False}
    plain, double = matmul_of(**sizes), matmul_of(**sizes, perf_mode="double_row")
    assert double.stream == plain.stream
    assert double.flops == 2 * plain.flops


def test_gpsimd_laws() -> None:
    assert cost_of("gpsimd", "tensor_tensor", "sbuf sbuf").stream == pytest.approx(800)
    assert cost_of("gpsimd", "tensor_tensor", "sbuf sbuf", "bfloat16 bfloat16").stream == pytest.approx(400)
    assert cost_of("gpsimd", "tensor_scalar", "sbuf sbuf", function="rsqrt").stream == pytest.approx(3200)
    assert cost_of("gpsimd", "topk", "sbuf sbuf", n=3840, k=64).stream == pytest.approx((4 * 3840 + 64) / 1.2)
    # by what it gathers, not by the table
    one, two = (cost_of("gpsimd", "nc_n_gather", "sbuf sbuf", count=count).stream for count in (512, 513))
    assert two - one == pytest.approx(N.gpsimd_gather_group_ns + N.gpsimd_search_cycles / N.gpsimd_ghz)


def test_dma_uses_the_engines_of_its_partitions() -> None:
    tape = EventBuilder()
    for start, stop, engines in ((0, 4, 1), (0, 128, 16), (0, 80, 10), (4, 12, 2), (64, 128, 8)):
        tile = tape.tile("sbuf", 1024, stop=stop, start=start)
        event = tape.transfer(tape.tile("hbm", 1024, stop=stop - start), tile)
        cost = dma_cost(event, N)
        assert len(cost.shares) == engines
        rows = stop - start
        full = rows * (N.dma_descriptor_ns + 4096 / N.dma_bytes_per_ns)
        assert sum(time for _, time in cost.shares) == pytest.approx(full)
        assert hbm_bytes(event) == rows * 4096


@pytest.mark.parametrize(
    ("rows", "row_bytes", "engines"), [(64, 4096, 8), (128, 2048, 16), (4096, 64, 16), (4096, 12, 8)]
)
def test_several_rows_a_partition_reach_more_engines_but_for_tiny_rows(rows: int, row_bytes: int, engines: int) -> None:
    tape = EventBuilder()
    tile = tape.tile("sbuf", 1024, stop=64)
    event = tape.transfer(tape.tile("hbm", 1024, stop=64), tile)
    cost = dma_cost(replace(event, work={**event.work, "rows": rows, "row_bytes": row_bytes}), N)
    assert len(cost.shares) == engines
    busy = rows * N.dma_descriptor_ns + 64 * 4096 / N.dma_bytes_per_ns
    assert sum(time for _, time in cost.shares) == pytest.approx(busy)


def test_a_gather_reads_its_rows_first() -> None:
    tape = EventBuilder()
    source, rows, tile = tape.tile("hbm", 64), tape.tile("sbuf", 1, "uint32"), tape.tile("sbuf", 64)
    plain = tape.transfer(source, tile, "swdge")
    gathered, scattered = replace(plain, reads=(source, rows)), replace(plain, reads=(tile, rows), writes=(source,))
    leads = [dma_cost(event, N).lead for event in (plain, gathered, scattered)]
    assert leads == [N.dma_load_lead_ns, N.dma_load_lead_ns + N.dma_index_ns, N.dma_store_lead_ns]


def test_a_transpose_moves_at_a_lower_rate() -> None:
    tape = EventBuilder()
    tile, source = tape.tile("sbuf", 128, "bfloat16"), tape.tile("hbm", 128, "bfloat16")
    event = tape.transfer(source, tile, "hwdge")
    transpose_cost = replace(event, op="dma_transpose", work={**event.work, "transpose": True})
    plain, longer = (dma_cost(e, N).shares[0][1] - 8 * N.dma_descriptor_ns for e in (event, transpose_cost))
    assert longer == pytest.approx(plain / 0.9)


@pytest.mark.parametrize("dge", ["swdge", "unknown"])
def test_software_descriptors_cost_by_the_engines_that_take_part(dge: str) -> None:
    tape = EventBuilder()
    for partitions, engines in ((1, 1), (128, 16)):
        tile, array = tape.tile("sbuf", 64, stop=partitions), tape.tile("hbm", 64, stop=partitions)
        event = tape.transfer(array, tile, dge)
        part, full, store = dma_cost(event, N), dma_cost(event, N, True), dma_cost(tape.transfer(tile, array, dge), N)
        assert part.interval == pytest.approx(N.dma_swdge_start_ns + engines * N.dma_swdge_engine_ns)
        assert full.interval == pytest.approx(part.interval * N.dma_swdge_full_tile_share)
        assert store.interval == pytest.approx(part.interval * N.dma_swdge_store_share)
        # only a mode that the kernel names keeps the gpsimd engine busy
        assert part.trigger == (part.interval if dge == "swdge" else N.dma_trigger_ns)


def test_hardware_has_a_generator_at_each_of_two_engines() -> None:
    tape = EventBuilder()
    event = tape.transfer(tape.tile("hbm", 64), tape.tile("sbuf", 64), "hwdge")
    there = [dma_cost(replace(event, work={**event.work, "issuer": issuer}), N) for issuer in ("sync", "scalar")]
    assert there[0].generator != there[1].generator
    assert [cost.interval for cost in there] == [N.dma_hwdge_interval_ns] * 2
    static = replace(event, work={**event.work, "dge": "none"})
    assert dma_cost(static, N).interval == N.dma_static_interval_ns


def test_collectives_cost_by_hops_between_chips() -> None:
    inside, nominal, torus = (collective_ns(0, ranks, 2, N) for ranks in (4, 32, 64))
    assert inside == N.collective_start_ns
    # 8 chips in a ring, there and back
    assert nominal == pytest.approx(N.collective_start_ns + 14 * N.collective_hop_ns)
    low, high = (collective_ns(0, 64, 2, TRN2.at(case)) for case in ("low", "high"))
    # 4 ranks of one chip: 13.0 to 13.8 us; 630 small all-reduces of 64 ranks: least 17.5 us, 90th percentile 135
    assert 13_000 <= inside <= 13_800
    assert torus == pytest.approx(17_500)
    assert low < torus < 135_000 < high


def test_an_all_gather_starts_later_and_only_chips_wait_for_each_other() -> None:
    """22 to 27 us among 4 ranks of one chip; the median of 64 ranks is 44.2 us, 26.7 of them waiting."""
    assert 22_000 <= collective_ns(0, 4, 2, N, gathers=True) <= 27_000
    waiting = replace(N, collective_wait_ns=26_700)
    assert collective_ns(0, 64, 2, waiting) == pytest.approx(44_200)
    assert collective_ns(0, 4, 2, waiting) == N.collective_start_ns


# operations that only a later core has
NEWER = {"activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2"}


def test_every_instruction_of_trn2_has_a_law() -> None:
    public = {n for n, f in vars(isa).items() if inspect.isfunction(f) and n[0] != "_"}
    instructions = public - NEWER - {"get_nc_version", "get_nc_sub_version"}
    known = TRANSFERS.union(ANYWHERE, *LAWS.values())
    assert len(instructions) > 40
    assert instructions - known == set()


def test_operation_without_a_law_is_refused() -> None:
    with pytest.raises(NotSimulated, match="no cost law"):
        law_of("vector", "exponential")
    with pytest.raises(NotSimulated, match="no cost law"):
        dma_cost(EventBuilder().add("dma", "teleport", (), ()), N)


def test_a_run_time_index_does_not_choose_the_dma_engines() -> None:
    def store(table: Any, start: Any) -> Any:
        index = nl.ndarray((1, 1), dtype=nl.int32)
        nisa.dma_copy(dst=index, src=start)
        made = harness.tile(128, 8)
        result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result[0:128, 8:64], src=table[0:128, 8:64])
        view = result.ap([[64, 128], [1, 8]], scalar_offset=index[0:1, 0:1], indirect_dim=1)
        nisa.dma_copy(dst=view, src=made)
        return result

    table, start = np.zeros((128, 64), np.float32), np.zeros((1, 1), np.int32)
    output = nkisim.run(store, (table, start), policy=nkisim.Policy(recording=True)).recording
    moved = [e for e in output.events if e.op == "dma_copy"][-1]
    assert len(dma_cost(moved, N).shares) == 16
