"""The table of stages: no stage runs before its input."""

from __future__ import annotations

import itertools

from nki_kernels.attention.pipeline import STAGES

# what a stage reads is written by the stage before it
CHAIN = ("load_keys", "scores", "exponentials", "transpose", "multiply", "add_sums", "add_values")
# (lag, place in the iteration, name) of each stage in the order in which a chunk passes them
TABLE = sorted((lag, place + 1, stage.__name__) for place, (lag, stage) in enumerate(STAGES))


def test_no_stage_before_its_input() -> None:
    at = {name: (lag, place) for lag, place, name in TABLE}
    assert len(at) == len(STAGES)
    for first, second in (*itertools.pairwise(CHAIN), ("load_values", "multiply")):
        assert at[first] < at[second], f"{second} before {first}"
