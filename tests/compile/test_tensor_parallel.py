"""Tensor parallelism executed: 2, 8 and 32 virtual ranks emit the tokens of one.

Head counts are those of Qwen3-14B and the drafts: 8 kv heads, so that 32 ranks hold each four times, 40 query heads,
whose groups of five fill the places of eight, and a draft of 16, which 32 ranks pad with zero heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compile.run_requests import tokens, tokens_of_process
from tests.compile.tiny import spec, write_model
from tests.model.family import untraced

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "target", 1, 0.2, num_attention_heads=40, **SIZES)
    changes = {"num_attention_heads": 16, "num_hidden_layers": 1, "tie_word_embeddings": True}
    write_model(folder / "draft", 2, 0.2, **changes, **SIZES)
    return folder


@pytest.fixture(scope="module")
def found(base: Path) -> dict[int, list[list[int]]]:
    """The ids of every request by the number of ranks; this process has two devices."""
    bundles = {tp: untraced(spec(base, f"tp{tp}", tp=tp, k=1)) for tp in (1, 2, 8, 32)}
    here = {tp: tokens(bundles[tp], 12) for tp in (1, 2)}
    return here | dict(zip((8, 32), tokens_of_process([bundles[8], bundles[32]], 12), strict=True))


# several kv heads a rank, one, and copies of one
@pytest.mark.parametrize("tp", [2, 8, 32])
def test_tokens_are_those_of_one_rank(found: dict[int, list[list[int]]], tp: int) -> None:
    one = found[1]
    assert found[tp] == one
    assert [len(ids) for ids in one] == [12, 12, 12]
    assert len({tuple(ids) for ids in one}) == 3
