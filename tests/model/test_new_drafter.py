"""A new drafter is one file and one line: this file is the one, `setitem` the line in model/drafters/registry.py.

Bigram: draft n + 1 is drawn of a table's row for draft n. It knows one id of the text, and the tokens are the target's.
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
from compile.doctor import findings
from model.backing import REFERENCE, Backing
from model.cut import IDS, Weight
from model.drafters import Drafter, DraftState
from model.drafters.kind import DraftModel, DraftPass, Kind
from model.drafters.registry import KINDS
from model.parallel import ONE_RANK, Head, Parallel
from model.rank_model import RankModel
from model.sampling import Draw
from model.strict import Range, read
from model.window import Window
from tests.compile.tiny import spec, write_model
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner


@dataclass(frozen=True)
class BigramConfig:
    """A table of an id's followers."""

    vocab_size: Annotated[int, Range(1, 1 << 16)]
    hidden_size: ClassVar[int] = 1
    num_hidden_layers: ClassVar[int] = 0
    num_attention_heads: ClassVar[int] = 1
    num_key_value_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    max_position_embeddings: ClassVar[int] = 1 << 30
    split: ClassVar[tuple[str, ...]] = ()
    ids: ClassVar[str] = "vocab_size"

    @property
    def parameter_count(self) -> int:
        return self.vocab_size**2


class BigramTable(RankModel):
    """logits(id) = the id's row of the table; a head over one-hot ids."""

    def __init__(self, config: Any, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        rows = config.vocab_size // parallel.of_head.tp
        self.table = Head(config.vocab_size, rows, parallel.of_head.ops, backing.sharded)

    def logits(self, ids_B1: Tensor) -> Tensor:
        """(B, 1, V)"""
        one_hot = torch.arange(self.config.vocab_size, dtype=torch.int32, device=ids_B1.device) == ids_B1[..., None]
        logits: Tensor = self.table(one_hot.to(self.table.weight.dtype))
        return logits


class Bigram(Drafter):
    """k rows of the table, one after the other."""

    model: BigramTable

    def __init__(self, model: BigramTable) -> None:
        self.model = model

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, drafts = self.model, [ids_BT]
        for n in range(window.k):
            _, of_row = window.row(n, draw, drafts[1:])
            logits_BV = model.logits(drafts[-1]).flatten(0, 1)
            drafts.append(model.kernels.coupled_sample(model.head_ops, logits_BV, of_row).merged()[:, None])
        return torch.cat(drafts, 1), state


KIND = Kind(
    "bigram",
    DraftModel(
        BigramConfig,
        claims=lambda raw: raw.get("model_type") == "bigram",
        read=lambda raw, where, target: read(BigramConfig, {"vocab_size": raw["vocab_size"]}),
        module=BigramTable,
        drafter=lambda model, target: Bigram(model),
        weights=lambda config, packing: [Weight("table.weight", "table.weight", (("table.weight", IDS),))],
        collectives=lambda config, parallel, passes: {"all-reduce": 0, "all-gather": 0},
        unread=lambda key, name: key.is_prefill,
    ),
    passes=lambda k, most: (DraftPass(1, 1),) * k,
)


def test_a_drafter_of_one_file_is_built_checked_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, which is harder than on one."""
    monkeypatch.setitem(KINDS, KIND.name, KIND)
    write_model(tmp_path / "target", 1, scale=0.3, eos_token_id=None)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": 64}))
    table_VV = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    save_file({"table.weight": table_VV}, draft / "model.safetensors")
    bundle = read_bundle(build(spec(tmp_path, draft=str(draft), tp=2)))
    assert bundle.spec.drafter == "bigram"
    assert findings(bundle) == []
    requests = [Request((5, 9, 2), Params(t, seed=n), 20) for n, t in enumerate((0.0, 0.9, 1.4))]
    graphs = XlaRunner(bundle)
    drafted = Engine(graphs, engine_config(bundle)).run(requests)
    alone = Engine(graphs, engine_config(bundle), False).run(requests)
    assert [r.ids for r in drafted] == [r.ids for r in alone]
    assert 0 < sum(sum(r.accepted) for r in drafted) < sum(sum(r.drafted) for r in drafted)
