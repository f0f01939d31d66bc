"""A new drafter is one file and one line: this file is the one, `setitem` the line in model/drafters/registry.py.

Bigram: draft n + 1 is sampled from a table's row for draft n. It knows one id of the text; the tokens are the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compile.build import build
from model.config import Qwen3Config
from model.context import Context
from model.drafter import Drafter, DraftState, StepRows
from model.drafters.registry import DRAFTERS
from model.layers import Head, LanguageModel
from model.sampling import SamplingParams
from model.strict import Range, read
from model.weights import ROWS, Packing, Weight
from tests.compile.tiny import spec, write_model
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner


@dataclass(frozen=True)
class BigramConfig:
    """A table of an id's followers; no layers, and sizes that any number of ranks divides."""

    vocab_size: Annotated[int, Range(1, 1 << 16)]
    hidden_size: ClassVar[int] = 1 << 20
    intermediate_size: ClassVar[int] = 1 << 20
    num_hidden_layers: ClassVar[int] = 0
    num_attention_heads: ClassVar[int] = 1
    num_key_value_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    max_position_embeddings: ClassVar[int] = 1 << 30
    head_size: ClassVar[str] = "vocab_size"


class BigramTable(LanguageModel):
    """logits(id) = the id's row of the table; a head over one-hot ids."""

    def __init__(self, config: Any, ctx: Context) -> None:
        super().__init__(config, ctx)
        self.table = Head(config.vocab_size, config.vocab_size, ctx)

    def logits(self, ids_B1: Tensor) -> Tensor:
        """(B, 1, V)"""
        one_hot = torch.arange(self.config.vocab_size, dtype=torch.int32, device=ids_B1.device) == ids_B1[..., None]
        logits: Tensor = self.table(one_hot.to(self.table.weight.dtype))
        return logits


class Bigram(Drafter):
    """k rows of the table, one after the other."""

    name = "bigram"
    config_type = BigramConfig
    model_type = BigramTable
    model: BigramTable

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        model, drafts = self.model, [ids_BT]
        for n in range(rows.k):
            samples = model.sample(model.logits(drafts[-1]), params.rows(n, n + 1, drafts[1:]), noise_BNV[:, n : n + 1])
            drafts.append(samples.token_ids())
        return torch.cat(drafts, 1), state

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        return raw.get("model_type") == "bigram"

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        return read(BigramConfig, {"vocab_size": raw["vocab_size"]})

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        return [Weight("table.weight", (("table.weight", ROWS),))]


@pytest.mark.slow
def test_a_drafter_of_one_file_is_built_checked_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, which is harder than on one."""
    monkeypatch.setitem(DRAFTERS, Bigram.name, Bigram)
    write_model(tmp_path / "target", 1, scale=0.3, eos_token_id=None)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": 64}))
    table_VV = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    save_file({"table.weight": table_VV}, draft / "model.safetensors")
    bundle = read_bundle(build(spec(tmp_path, draft=str(draft), tp=2)))
    assert bundle.spec.drafter == "bigram"
    requests = [Request((5, 9, 2), Params(t, seed=n), 20) for n, t in enumerate((0.0, 0.9, 1.4))]
    runner, config = XlaRunner(bundle), engine_config(bundle)
    drafted, target = (Engine(runner, config, speculative).run(requests) for speculative in (True, False))
    assert [r.ids for r in drafted] == [r.ids for r in target]
    assert 0 < sum(sum(r.accepted) for r in drafted) < sum(sum(r.drafted) for r in drafted)
