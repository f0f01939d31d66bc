"""PARD parallel drafts: one pass over the input id and k - 1 mask tokens gives the k drafts.

PARD (An et al., arXiv 2504.18583; AMD-AGI/PARD, pard/pard_infer.py) is a Qwen3 trained to predict at mask tokens. The
published pass has the ids accepted since the last pass, then k - 1 masks; drafts are sampled from the rows of the last
id and of the masks. A mask attends the ids and masks before it, and no draft.

Here a pass always has R = K + k rows, with K the largest k of the bundle: the last K ids, the input id at position p,
and masks, so graph offsets do not depend on how many ids the last step accepted. Ids that are cached already are
rewritten with the same bits. Masks write rows p + 1 and up; the next pass overwrites them before they are attended: a
step emits at most K + 1 ids, so its rows begin at p' - K <= p + 1. A sequence of fewer than K + 1 ids begins at
position 0 and has more masks, whose logits are not used.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from model.config import Qwen3Config, config_from_dict
from model.drafter import DraftState, StateSpec, StepRows
from model.drafters.chain import Chain
from model.errors import UserError
from model.ops import gather_rows, iota
from model.sampling import SamplingParams
from model.strict import Range

# keys of config.json with the mask token's id, in order of precedence; vLLM reads the same keys
# (vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params)
_MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(Qwen3Config):
    """A Qwen3 and the id of its mask token."""

    mask_id: Annotated[int, Range(0, 1 << 31)]


class Parallel(Chain):
    """Drafts with one pass of a Qwen3 with a mask token; K is the largest k of the bundle."""

    name = "parallel"
    config_type = MaskedConfig
    state_spec = (StateSpec("ids", "B K 1", "int32"),)
    default_ks = (7,)
    max_k = 16

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        model, k, (before_BK1,) = self.model, rows.k, state.slots
        config: Any = model.config
        max_k, position_B1 = before_BK1.shape[1], rows.meta.positions_BN[:, :1]
        rows_R = iota(max_k + k, ids_BT)
        input_row_B1 = position_B1.clamp(max=max_k)
        masks_BR = torch.full_like(rows_R, config.mask_id).expand(len(ids_BT), -1)
        ids_BR = torch.cat((before_BK1.squeeze(-1), ids_BT, masks_BR), 1)
        ids_BR = gather_rows(ids_BR.unsqueeze(-1), max_k - input_row_B1 + rows_R).squeeze(-1)
        meta = rows.meta._replace(positions_BN=position_B1 - input_row_B1 + rows_R)
        x_BRE, caches, _ = model.hidden(ids_BR, state.caches, meta)
        logits_BkV = model.logits(gather_rows(x_BRE, input_row_B1 + iota(k, ids_BT)))
        drafts_Bk = model.sample(logits_BkV, params.rows(0, k, []), noise_BNV[:, :k]).token_ids()
        return torch.cat((ids_BT, drafts_Bk), 1), DraftState(caches, state.slots)

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        return any(raw.get(key) is not None for key in _MASK_KEYS)

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        config = config_from_dict(raw, where)
        mask_id = next((raw[key] for key in _MASK_KEYS if raw.get(key) is not None), None)
        if type(mask_id) is not int or not 0 <= mask_id < config.vocab_size:
            raise UserError(
                f"{where} has {mask_id!r} as pard_token; a parallel draft needs the id of its mask token there: give "
                "the folder of such a checkpoint, or --drafter chain"
            )
        return MaskedConfig(**vars(config), mask_id=mask_id)
