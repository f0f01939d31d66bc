"""One pass for k drafts: the rows after the input id are masks, each of which stands for an id that is not yet known.

PARD (An et al., arXiv 2504.18583; AMD-AGI/PARD, pard/pard_infer.py): a plain Qwen3 that was trained to predict at
mask tokens. Its pass takes the ids kept since the last one and k - 1 masks; the logits of the last id's row and of the
masks' are the k drafts. Every mask sees the ids and the masks before it, and no draft.

Here a pass always has R = K + k rows, K the most that a step of the bundle drafts: the last K ids, the input id at
position p, and masks. So no offset depends on how many ids the last step kept. Ids whose rows are in the cache already
are written again, with the same bits; the rows that masks write at p + 1 and on are overwritten by the next pass before
anything may see them: at most K + 1 ids are kept, so that its rows begin at p' - K <= p + 1. A sequence of fewer than
K + 1 ids begins at position 0 and has more masks, whose rows are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from model.cache import AttentionMetadata
from model.config import Qwen3Config, config_from_dict
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot, moved
from model.drafters.chain import CHAIN
from model.drafters.kind import DraftPass, Kept, Kind
from model.errors import UserError
from model.ops import iota, rows_of
from model.qwen3 import Qwen3
from model.sampling import Draw
from model.strict import Range
from model.window import Window

# where a published checkpoint's config.json has the id of its mask rows; vLLM reads the same keys
# (vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params)
_MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


@dataclass(frozen=True)
class MaskedConfig(Qwen3Config):
    """A Qwen3 with the id of its mask rows."""

    mask_id: Annotated[int, Range(0, 1 << 31)] = -1


class MaskedDraft(Drafter):
    """A Qwen3 with a mask token; it remembers the last K ids before the input id."""

    model: Qwen3

    def __init__(self, model: Qwen3, mask_id: int) -> None:
        self.model, self.mask_id = model, mask_id

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model = self.model
        ids_BR, meta, own_B1 = self._rows(window, ids_BT, state.kept[0])
        passed = model.hidden(ids_BR, state.caches, meta)
        logits_RV = model.logits(rows_of(passed.x_BNE, own_B1 + iota(window.k, own_B1))).flatten(0, 1)
        draws = model.kernels.coupled_sample(model.head_ops, logits_RV, window.of_drafts(draw))
        drafts_Bk = draws.merged().unflatten(0, (-1, window.k))
        return torch.cat((ids_BT, drafts_Bk), 1), DraftState(passed.caches, state.kept)

    def _rows(self, window: Window, ids_B1: Tensor, before_BK1: Tensor) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """The ids of a pass, where they are, and the row (B, 1) of the input id."""
        most, position_B1 = before_BK1.shape[1], window.meta.positions_BN[:, :1]
        rows_R = iota(most + window.k, ids_B1)
        own_B1 = position_B1.clamp(max=most)
        masks_BR = torch.full_like(rows_R, self.mask_id).expand(ids_B1.shape[0], -1)
        known = torch.cat((before_BK1, ids_B1.unsqueeze(-1), masks_BR.unsqueeze(-1)), 1)
        meta = window.meta._replace(positions_BN=position_B1 - own_B1 + rows_R)
        return rows_of(known, most - own_B1 + rows_R).squeeze(-1), meta, own_B1

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        ids_BN1 = verified.candidates_BN.unsqueeze(-1)
        return state._replace(kept=(moved(state.kept[0], ids_BN1, verified.count_B1),))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        caches = self.model.hidden(prompt.ids_1S, state.caches, prompt.meta).caches
        (before_BK1,) = state.kept
        most = before_BK1.shape[1]
        # places before a short prompt's beginning are never used
        last_1K = (prompt.length_1[:, None] - most + iota(most, prompt.length_1)).clamp(min=0)
        return DraftState(caches, (in_slot(before_BK1, rows_of(prompt.ids_1S.unsqueeze(-1), last_1K), prompt.slot_1),))


def _mask_id(raw: dict[str, Any]) -> Any:
    return next((raw[key] for key in _MASK_KEYS if raw.get(key) is not None), None)


def _read(raw: dict[str, Any], where: str, target: Qwen3Config) -> MaskedConfig:
    config, mask_id = config_from_dict(raw, where), _mask_id(raw)
    if type(mask_id) is not int or not 0 <= mask_id < config.vocab_size:
        raise UserError(
            f"{where} has {mask_id!r} as pard_token; a parallel draft needs the id of its mask token there: give the "
            "folder of such a checkpoint, or --drafter chain"
        )
    return MaskedConfig(**vars(config), mask_id=mask_id)


def _passes(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(most + k, k),)


KIND = Kind(
    "parallel",
    replace(
        CHAIN,
        config=MaskedConfig,
        claims=lambda raw: _mask_id(raw) is not None,
        read=_read,
        drafter=lambda model, target: MaskedDraft(model, model.config.mask_id),
    ),
    _passes,
    kept=(Kept("ids", "B K 1", "int32"),),
    limit=16,
    decodes=True,
)
