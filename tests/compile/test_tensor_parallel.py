"""Tensor parallelism executed: 2, 8 and 32 virtual ranks emit the tokens of one.

Head counts are those of Qwen3-14B and the drafts: 8 kv heads, so that 32 ranks hold each four times, 40 query heads,
whose groups of five fill the places of eight, and a draft of 16, which 32 ranks pad with zero heads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from tests.compile.tiny import spec, write_model

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "target", 1, 0.2, num_attention_heads=40, **SIZES)
    changes = {"num_attention_heads": 16, "num_hidden_layers": 1, "tie_word_embeddings": True}
    write_model(folder / "draft", 2, 0.2, **changes, **SIZES)
    return folder


def run(base: Path, tp: int) -> dict[str, Any]:
    bundle = build(spec(base, f"tp{tp}", tp=tp))
    command = [sys.executable, "-m", "tests.compile.run_requests", str(bundle)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def one(base: Path) -> dict[str, Any]:
    return run(base, 1)


# several kv heads a rank, one, and copies of one
@pytest.mark.parametrize("tp", [2, 8, 32])
def test_tokens_are_those_of_one_rank(base: Path, one: dict[str, Any], tp: int) -> None:
    many = run(base, tp)
    assert many["ranks"] == tp
    assert many["ids"] == one["ids"]
    assert [len(ids) for ids in one["ids"]] == [16, 16, 12]
    assert len({tuple(ids) for ids in one["ids"]}) == 3
