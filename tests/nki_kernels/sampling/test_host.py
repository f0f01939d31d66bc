"""Bad operands of the sampling kernels: one sentence each, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nki_kernels.sampling.host import Proposal, Shard

from nki_kernels.sampling import host
from tests.nki_kernels.sampling.inputs import NO_FLOOR, one


def refuse_to_run(kernel: Any) -> Any:
    raise AssertionError("the kernel was launched")


def noise(**changed: Any) -> None:
    operands: dict[str, Any] = {
        "seeds": np.zeros((4, 2), np.int32),
        "positions": np.zeros((4, 1), np.int32),
        "start": one(0),
        "columns": 50,
        "run": refuse_to_run,
    }
    host.gumbel_noise(**(operands | changed))


def draw(**changed: Any) -> None:
    operands: dict[str, Any] = {
        "shard": Shard(np.zeros((4, 50), np.float32), one(0)),
        "noise": np.zeros((4, 50), np.float32),
        "temperature": np.ones((4, 1), np.float32),
        "floor": np.full((4, 1), NO_FLOOR),
        "run": refuse_to_run,
    }
    host.coupled_sample(**(operands | changed))


def above(**changed: Any) -> None:
    column = np.zeros((4, 1), np.float32)
    operands: dict[str, Any] = {
        "logits": np.zeros((4, 50), np.float32),
        "weigh": (column, column),
        "floor": column,
        "thresholds": np.zeros((4, 7), np.float32),
        "run": refuse_to_run,
    }
    host.weights_above(**(operands | changed))


def accept(**changed: Any) -> None:
    operands: dict[str, Any] = {
        "values": np.zeros((2, 4, 3), np.float32),
        "ids": np.zeros((2, 4, 3), np.int32),
        "proposal": Proposal(np.zeros((4, 2), np.int32), np.zeros((4, 1), np.int32), np.zeros((4, 1), np.int32)),
        "run": refuse_to_run,
    }
    host.accept_drafts(**(operands | changed))


NAN = np.full((4, 50), np.nan, np.float32)
PROPOSAL = Proposal(np.zeros((4, 2), np.int32), np.zeros((4, 1), np.int32), np.zeros((4, 1), np.int32))
BAD: list[tuple[Callable[..., None], str, dict[str, Any]]] = [
    (noise, "there are 129 rows", {"seeds": np.zeros((129, 2), np.int32)}),
    (noise, "seeds is int64", {"seeds": np.zeros((4, 2), np.int64)}),
    (noise, "positions is int32 \\(4,\\)", {"positions": np.zeros(4, np.int32)}),
    (noise, "positions run from 0 to 16777216", {"positions": np.array([[0], [1], [2], [1 << 24]], np.int32)}),
    (noise, "positions run from -1", {"positions": np.full((4, 1), -1, np.int32)}),
    (noise, "the domain is 64", {"domain": 64}),
    (noise, "the shard has 0 ids", {"columns": 0}),
    (noise, "start is", {"start": np.zeros((1, 1), np.float32)}),
    (noise, "lnc is 3", {"lnc": 3}),
    (draw, "logits hold NaN", {"shard": Shard(NAN, one(0))}),
    (draw, "logits are \\(4, 2, 25\\)", {"shard": Shard(np.zeros((4, 2, 25), np.float32), one(0))}),
    (draw, "logits is float16", {"shard": Shard(np.zeros((4, 50), np.float16), one(0))}),
    (draw, "noise is float32 \\(50, 4\\)", {"noise": np.zeros((50, 4), np.float32)}),
    (draw, "a temperature is negative", {"temperature": np.full((4, 1), -1, np.float32)}),
    (draw, "a temperature is negative or NaN", {"temperature": np.full((4, 1), np.nan, np.float32)}),
    (draw, "a floor removes every id", {"floor": np.full((4, 1), 0.5, np.float32)}),
    (above, "there are 33 rows", {"logits": np.zeros((33, 50), np.float32)}),
    (above, "0 thresholds", {"thresholds": np.zeros((4, 0), np.float32)}),
    (above, "scale is", {"weigh": (np.zeros(4, np.float32), np.zeros((4, 1), np.float32))}),
    (accept, "there are 129 shards", {"values": np.zeros((129, 4, 3), np.float32)}),
    (accept, "values are \\(4, 3\\)", {"values": np.zeros((4, 3), np.float32)}),
    (accept, "ids is int64", {"ids": np.zeros((2, 4, 3), np.int64)}),
    (accept, "drafts is int32 \\(4, 3\\)", {"proposal": PROPOSAL._replace(drafts=np.zeros((4, 3), np.int32))}),
    (accept, "drafts are missing for N = 3", {"proposal": PROPOSAL._replace(drafts=None)}),
    (accept, "a limit is negative", {"proposal": PROPOSAL._replace(limits=np.full((4, 1), -1, np.int32))}),
]


@pytest.mark.parametrize(("call", "sentence", "changed"), BAD, ids=[f"{b[0].__name__}: {b[1]}" for b in BAD])
def test_refused(call: Callable[..., None], sentence: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        call(**changed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [noise, draw, above, accept])
def test_the_same_call_unchanged_is_launched(call: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="launched"):
        call()


def test_a_shard_may_lose_all_its_ids() -> None:
    """A floor above a shard's best is right if another shard holds a better logit."""
    with pytest.raises(AssertionError, match="launched"):
        draw(floor=np.full((4, 1), 0.5, np.float32), best=np.ones((4, 1), np.float32))
