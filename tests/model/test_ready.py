"""What is measured before any request."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model.serving.ready import step_seconds
from tests.model.family import some_graphs


def test_a_step_is_timed_at_the_end_of_its_bucket(family: Path) -> None:
    """On a CPU the loop over tiles of keys ends at the last one that a row sees: nearer, all buckets cost the same."""
    held = some_graphs(family, "none", max_len=256)
    assert sorted(step_seconds(held)) == [(0, 128), (0, 256)]
    written = np.asarray(held._state["target_model.kv.0.k"]).any(axis=(1, 3))
    # of three sequences: the last position of one block, and of the second of two
    assert written[:, 127].nonzero()[0].tolist() == [1, 2, 3, 4, 6]
    assert not written[:, :127].any()
