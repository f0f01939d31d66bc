"""Medusa: one head a draft, all of them on the target's last hidden state; no draft sees the others.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774);
vLLM (vllm/model_executor/models/medusa.py) has the names. Head i, residual layers x + silu(W x) and a projection to the
vocabulary, predicts the id i + 1 places after the input id, from the state of the row before it: the last row of the
target that was kept. So there is no cache and no pass of layers, and a step reads each head's weights once.

W is cut by rows: each rank computes whole outputs of its own, and one all-gather a layer brings those of all heads
together: no sum crosses ranks. A copy of W on every rank would need no collective, but read tp times the bytes of HBM,
which take most of the time of a step of few rows: at the 32B's width and tp 32, 52 MB for each head and layer, not 1.6.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.backing import REFERENCE, Backing
from model.bundle.cut import IDS, ROWS, Weight
from model.config import Qwen3Config
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot, rows_of
from model.drafters.kind import Counts, DraftModel, DraftPass, Kept, Kind
from model.errors import UserError
from model.graph_key import GraphKey
from model.packing import Packing
from model.parallel import ONE_RANK, ColumnLinear, Head, Parallel
from model.rank_model import RankModel
from model.sampling import Draw
from model.strict import Range, Wrong, read
from model.window import Window


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads: `layers` residual blocks each on the target's last state, and a projection, shared or one each.

    There is no attention: no caches, no limit of positions, no heads to count.
    """

    hidden_size: Annotated[int, Range(1, 1 << 17)]
    vocab_size: Annotated[int, Range(1, 1 << 22)]
    heads: Annotated[int, Range(1, 31)]
    layers: Annotated[int, Range(1, 64)]
    shared_head: bool
    num_hidden_layers: ClassVar[int] = 0
    num_attention_heads: ClassVar[int] = 1
    num_key_value_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    max_position_embeddings: ClassVar[int] = sys.maxsize
    split: ClassVar[tuple[str, ...]] = ("hidden_size",)
    ids: ClassVar[str] = "vocab_size"

    def misfit(self, target: Qwen3Config, k: int) -> str:
        """Why these heads cannot draft k ids for a target; "" if they can."""
        if self.hidden_size != target.hidden_size:
            return f"read states of {self.hidden_size} numbers, the target's have {target.hidden_size}"
        return f"are {self.heads} heads and k is {k}" if k > self.heads else ""

    @property
    def parameter_count(self) -> int:
        """Parameters of blocks and projections."""
        projections = 1 if self.shared_head else self.heads
        return self.heads * self.layers * self.hidden_size**2 + projections * self.vocab_size * self.hidden_size


class Block(nn.Module):
    """The residual layers of one head."""

    def __init__(self, config: MedusaConfig, tp: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(ColumnLinear(size, size // tp) for _ in range(config.layers))

    def forward(self, x_BE: Tensor, layer: int) -> Tensor:
        """(B, E / tp) W x of one of the layers: this rank's outputs."""
        outputs: Tensor = self.layers[layer](x_BE)
        return outputs


class MedusaHeads(RankModel):
    """The heads of one rank; they have a projection each, or share the first."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        size, of_head = config.hidden_size, parallel.of_head
        self.blocks = nn.ModuleList(Block(config, parallel.tp) for _ in range(config.heads))
        count = 1 if config.shared_head else config.heads
        # gathered for all heads at once, if at all
        heads = (Head(size, config.vocab_size // of_head.tp, of_head.ops, sharded=True) for _ in range(count))
        self.lm_heads = nn.ModuleList(heads)

    def logits(self, last_B1E: Tensor, k: int) -> Tensor:
        """(B, k, V) fp32 logits of the first k heads, of this rank's ids alone if the kernels draw from shards."""
        ops, x_BkE = self.parallel.ops, last_B1E.expand(-1, k, -1)
        for layer in range(self.config.layers):
            x_BkE = x_BkE + F.silu(ops.all_gather(_each(self.blocks[:k], x_BkE, layer)))
        logits = self.lm_heads[0](x_BkE) if self.config.shared_head else _each(self.lm_heads[:k], x_BkE)
        return logits if self.backing.sharded else self.head_ops.all_gather(logits)


def _each(modules: nn.ModuleList, x_BkE: Tensor, *more: int) -> Tensor:
    """(B, k, F): each head's module on its own row."""
    return torch.stack([module(x_BkE[:, i], *more) for i, module in enumerate(modules)], 1)


class Medusa(Drafter):
    """Heads that remember one state (B, 1, E): the normed one of the target's last kept row."""

    model: MedusaHeads

    def __init__(self, model: MedusaHeads, target_layers: int) -> None:
        self.model, self.taps = model, (target_layers,)

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model = self.model
        logits_RV = model.logits(state.kept[0], window.k).flatten(0, 1)
        draws = model.kernels.coupled_sample(model.head_ops, logits_RV, window.of_drafts(draw))
        return torch.cat((ids_BT, draws.merged().unflatten(0, (-1, window.k))), 1), state

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        assert verified.features_BNF is not None
        return state._replace(kept=(rows_of(verified.features_BNF, verified.count_B1 - 1),))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        slot_1, (before_B1E,) = prompt.placement.slots_B, state.kept
        assert slot_1 is not None
        assert prompt.features_1SF is not None
        last_11E = rows_of(prompt.features_1SF, prompt.length_1[:, None] - 1)
        return state._replace(kept=(in_slot(before_B1E, last_11E, slot_1),))


def _read(raw: dict[str, Any], where: str, target: Qwen3Config) -> MedusaConfig:
    """As vLLM reads it (vllm/transformers_utils/configs/medusa.py): Medusa's own names are longer."""
    vocabulary = raw.get("vocab_size")
    for what, value, plain in (
        ("medusa_fc_bias", raw.get("medusa_fc_bias", False), False),
        ("truncated_vocab_size", raw.get("truncated_vocab_size") or vocabulary, vocabulary),
        ("logit_scale", raw.get("logit_scale", 1.0), 1.0),
    ):
        if value != plain:
            raise UserError(f"{where} sets {what} to {value!r}, which is not supported; use heads with {plain!r}")
    values = {
        "hidden_size": raw.get("hidden_size"),
        "vocab_size": vocabulary,
        "heads": raw.get("num_heads", raw.get("medusa_num_heads")),
        "layers": raw.get("num_hidden_layers", raw.get("medusa_num_layers")),
        "shared_head": raw.get("original_lm_head", False),
    }
    try:
        return read(MedusaConfig, values)
    except Wrong as wrong:
        raise UserError(f"{where}: {wrong}; give the folder of complete Medusa heads") from wrong


def _weights(config: MedusaConfig, packing: Packing) -> list[Weight]:
    """vLLM's names, which are ours and the bundle's too; every matrix is cut by rows."""
    projections = 1 if config.shared_head else config.heads
    names = {f"blocks.{h}.layers.{n}.weight": ROWS for h in range(config.heads) for n in range(config.layers)}
    names |= {f"lm_heads.{h}.weight": IDS for h in range(projections)}
    return [Weight(name, name, ((name, cut),)) for name, cut in names.items()]


def _collectives(config: MedusaConfig, parallel: Parallel, passes: tuple[DraftPass, ...]) -> Counts:
    """One gather of all heads' outputs behind each of their layers."""
    drawn = sum(p.drawn > 0 for p in passes)
    return {"all-reduce": 0, "all-gather": drawn * config.layers if parallel.tp > 1 else 0}


def _unread(key: GraphKey, name: str) -> bool:
    """A prompt runs no head, and a step one for each draft."""
    head = re.match(r"(?:blocks|lm_heads)\.([0-9]+)\.", name)
    return head is not None and (key.is_prefill or int(head[1]) >= key.k)


def _passes(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(1, k),)


KIND = Kind(
    "medusa",
    DraftModel(
        MedusaConfig,
        claims=lambda raw: raw.get("model_type") == "medusa" or "medusa_num_heads" in raw,
        read=_read,
        module=MedusaHeads,
        drafter=lambda model, target: Medusa(model, target.num_hidden_layers),
        weights=_weights,
        collectives=_collectives,
        unread=_unread,
    ),
    _passes,
    kept=(Kept("state", "B 1 H"),),
)
