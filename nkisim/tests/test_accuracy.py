"""The accuracy table: sketches are what kernels record, the committed table is current, the aims hold."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nkisim import launch
from nkisim.event import Event
from nkisim.policy import Policy
from nkisim.timeline.compiler_model import CompilerModel
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from validation import __main__ as command
from validation.excluded import SAME, UNRUN, unrun_section
from validation.kernels import added, rms_norm
from validation.operators import OPERATORS
from validation.outcome import Outcome, misordered, outcome, summary
from validation.rows import ROWS, Row
from validation.second_batch import LATER

nisa: Any = import_module("nkisim.isa")
nl: Any = import_module("nkisim.language")
ROOT, TIME = Path(__file__).parents[1], "docs/time.md"


def normed(source: Any, weight: Any) -> Any:
    """The RMSNorm as a kernel."""
    rows, columns = source.shape
    out = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((128, columns), dtype=weight.dtype, buffer=nl.sbuf)
    for p in range(128):
        nisa.dma_copy(dst=scale[p : p + 1, 0:columns], src=weight[0:1, 0:columns])
    for row in range(0, rows, 128):
        tile = nl.ndarray((128, columns), dtype=source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=source[row : row + 128, :])
        squares = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation_reduce(dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total)
        root = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=root, op=nl.rsqrt, data=total)
        scaled = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scaled, data=tile, op0=nl.multiply, operand0=root)
        result = nl.ndarray((128, columns), dtype=source.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=scaled, data2=scale, op=nl.multiply)
        nisa.dma_copy(dst=out[row : row + 128, :], src=result)
    return out


def summed(left: Any, right: Any) -> Any:
    """The sum of two vectors as a kernel: (n, 1) a column of 128 at a time, (128, n) two columns at a time."""
    out = nl.ndarray(left.shape, dtype=left.dtype, buffer=nl.shared_hbm)
    rows, width = left.shape
    columns = min(2, width)
    for i in range(rows * width // (128 * columns)):
        first, start = (i * 128, 0) if width == 1 else (0, i * columns)
        where = slice(first, first + 128), slice(start, start + columns)
        tiles = [nl.ndarray((128, columns), dtype=left.dtype, buffer=nl.sbuf) for _ in range(3)]
        for tile, source in zip(tiles, (left, right), strict=False):
            nisa.dma_copy(dst=tile, src=source[where])
        if width == 1:
            nisa.tensor_scalar(dst=tiles[2], data=tiles[0], op0=nl.add, operand0=tiles[1])
        else:
            nisa.tensor_tensor(dst=tiles[2], data1=tiles[0], data2=tiles[1], op=nl.add)
        nisa.dma_copy(dst=out[where], src=tiles[2])
    return out


def recorded(kernel: Any, *shapes: tuple[int, int]) -> list[Event]:
    dtype = np.float32 if kernel is summed else ml_dtypes.bfloat16
    arrays = tuple(np.ones(shape, dtype) for shape in shapes)
    return launch.run(kernel, arrays, policy=Policy(recording=True)).recording.events


@pytest.mark.parametrize(
    ("kernel", "shapes", "sketch"),
    [
        (normed, ((256, 256), (1, 256)), lambda: rms_norm((256, 256))),
        (summed, ((512, 1), (512, 1)), lambda: added(512, 128, 1)),
        (summed, ((128, 8), (128, 8)), lambda: added(1024, 128, 2)),
    ],
    ids=["RMSNorm", "sum of columns", "sum of rows"],
)
def test_a_sketch_is_what_its_kernel_records(kernel: Any, shapes: Any, sketch: Any) -> None:
    real, samples = recorded(kernel, *shapes), sketch()
    assert [(e.engine, e.op) for e in real] == [(e.engine, e.op) for e in samples]
    times = schedule(real), schedule(samples)
    assert times[0].latency_ns == pytest.approx(times[1].latency_ns)
    assert times[0].hbm_bytes == times[1].hbm_bytes


def few() -> list[Outcome]:
    return [outcome(row) for row in ROWS if "cop" in row.name or row.name == "blocked matmul 4096 x 256 x 2048"]


def test_summary_counts_bands_and_pairs() -> None:
    row = ROWS[0]
    one, two = replace(row, us=100.0), replace(row, us=110.0)
    right = [
        Outcome(one, 110.0, 90.0, 120.0, 110.0, 110.0, 105.0, 120.0),
        Outcome(two, 121.0, 115.0, 130.0, 121.0, 121.0, 105.0, 130.0),
    ]
    s = summary(right)
    assert (s.rows, s.inside, s.likely, s.pairs, s.ordered) == (2, 1, 1, 1, 1)
    assert s.error == pytest.approx(0.10)
    wrong = summary([right[0], replace(right[1], us=109.0)])
    assert (wrong.pairs, wrong.ordered) == (1, 0)
    assert summary([right[0], replace(right[1], row=replace(one, us=101.0))]).pairs == 0


def test_a_pair_within_its_records_spread_is_not_decided() -> None:
    """Two rows 10 % apart: decided where repeats differ by 2 %, not where one kernel differed by 11 % from itself."""
    slow, fast = (replace(ROWS[0], name=name, us=us) for name, us in (("slow", 110.0), ("fast", 100.0)))
    pair = [
        Outcome(slow, 90.0, 80.0, 120.0, 90.0, 90.0, 75.0, 108.0),
        Outcome(fast, 95.0, 80.0, 120.0, 95.0, 95.0, 79.0, 114.0),
    ]
    assert [(a.row.name, b.row.name) for a, b in misordered(reversed(pair))] == [("slow", "fast")]
    noisy = [replace(pair[0], row=replace(slow, spread=1.11)), pair[1]]
    assert summary(noisy).pairs == 0
    assert not misordered(noisy)
    assert "slow | fast | 1.100 | 0.947" in command.wrong_pairs(pair)
    assert command.wrong_pairs(noisy) == ""


def test_a_wrong_constant_is_noticed() -> None:
    """Negative control: descriptors three times as dear miss the tiled copy."""
    slow = replace(TRN2, dma_swdge_engine_ns=replace(TRN2.dma_swdge_engine_ns, value=110.0))
    row = next(row for row in ROWS if row.name == "tiled copy 4096 x 128")
    assert outcome(row, slow).ratio > 1.5


def test_the_committed_table_has_every_row_as_it_is_now() -> None:
    text = (Path(command.__file__).parent / "results.md").read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 8]
    assert len(listed) == 1 + len(command.SECTIONS) + len(command.EVERY)
    for o in [*few(), outcome(OPERATORS[0]), *(outcome(row) for row in LATER if "512 x 128" in row.name)]:
        assert command.table([o]).splitlines()[-1] in text
    assert text.endswith(unrun_section(len(command.EVERY)))


def test_every_published_version_has_a_row_or_a_reason() -> None:
    versions = sum(u.count for u in UNRUN)
    assert unrun_section(10).startswith(f"## Versions without a row\n\n{10 + versions} versions published, 10 have ")
    assert len({u.name for u in UNRUN}) == len(UNRUN)
    assert all(u.why and f"| {u.name} | {u.record} |" in unrun_section(10) for u in UNRUN)
    names = {row.name for row in command.EVERY}
    before, after = SAME.split("{}")
    again = [u.why[len(before) : -len(after)] for u in UNRUN if u.why.startswith(before)]
    assert again
    assert set(again) <= names


def test_the_document_repeats_the_table() -> None:
    table, document = ((ROOT / name).read_text(encoding="utf-8") for name in ("validation/results.md", TIME))
    pattern = r"geometric mean error ([\d.]+)%, (\d+) of \d+ rows inside the band, (\d+ of \d+) pairs"
    result = re.findall(pattern, table)
    assert len(result) == 3 + len(command.SECTIONS)
    for error, inside, pairs in result:
        assert f"now | {error} % | {inside} | {pairs} |" in document


def test_the_document_names_every_option_of_the_compiler_model() -> None:
    document = (ROOT / TIME).read_text(encoding="utf-8")
    options = {f"CompilerModel.{field.name}" for field in fields(CompilerModel)}
    names = options | {"nkisim.geometry.NEURONX_CC", "transposed_together"}
    assert {name for name in names if f"`{name}`" not in document} == set()


def test_every_row_has_its_source_and_name_once() -> None:
    names = [row.name for row in command.EVERY]
    assert len(set(names)) == len(names)
    assert all(isinstance(row, Row) and row.source and row.us > 0 and row.launches for row in command.EVERY)
