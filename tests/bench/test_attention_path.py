"""The critical path of verify_attention by stage, and the bound beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.attention_bound import SHARD, bound_ns, key_path, value_path
from bench.attention_path import LIFTED, events, path_us, without
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2


@pytest.mark.parametrize("cores", [1, 2])
def test_the_stages_are_the_latency(cores: int) -> None:
    """The parts add up, the bound is below them, and what is data is less than the whole."""
    launch = events(cores)
    timed = schedule(launch, band=False)
    stages = path_us(launch, timed)
    whole, data = (sum(column) for column in zip(*stages.values(), strict=True))
    assert whole == pytest.approx(timed.latency_ns / 1e3)
    assert bound_ns(SHARD, cores) / 1e3 < whole
    assert 0 < data < whole
    assert {"load", "scores, tensor", "exponentials, scalar", "weigh, tensor", "store"} <= set(stages)


def test_lifting_nothing_changes_nothing() -> None:
    """A chip without a law has its other value, and no other constant moves."""
    assert without(**LIFTED[0][1]) == TRN2
    chip = without(scalar_ghz=2.4)
    assert chip.at("nominal").scalar_ghz == chip.at("high").scalar_ghz == 2.4
    assert replace(chip, scalar_ghz=TRN2.scalar_ghz) == TRN2


@pytest.mark.parametrize(("slots", "path"), [(1024, value_path), (64, key_path)])
def test_the_bound_is_the_longer_path(slots: int, path: object) -> None:
    """Of a short cache the keys' chain is longer, of a long one the values' bytes."""
    d = replace(SHARD, slots=slots)
    sums = {each: sum(part.ns for part in each(d)) for each in (value_path, key_path)}
    assert bound_ns(d) == sums[path] == max(sums.values())  # type: ignore[index]
