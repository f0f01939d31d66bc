"""A parallel draft: all k drafts from one pass of a plain Qwen3 draft, by the recipe of PARD.

An, Bai, Liu, Li, Barsoum, "PARD: accelerating LLM inference with low-cost parallel draft model adaptation"
(arXiv 2504.18583). The pass reads the kept tokens and then k - 1 copies of one mask token, causally; the logits of the
last kept row and of the mask rows are the k drafts. Training puts the mask rows of many anchors into one pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from demo.drafter import Drafter, K, TargetPass
from demo.learn import distillation_loss
from demo.models import save

# the token of byte 0xFF: no UTF-8 text contains it, so no text is encoded to it
UNUSED_TOKEN = "\u00ff"
# conditional drop: of S positions, S max(RATIO^i, LEAST) keep their i-th mask row
RATIO, LEAST = 0.7, 0.12


@dataclass(frozen=True)
class Layout:
    """The rows of a pass: row r stands `offset_R[r]` mask rows after the kept token at position `anchor_R[r]`."""

    anchor_R: torch.Tensor
    offset_R: torch.Tensor

    @property
    def position_R(self) -> torch.Tensor:
        """Position of each row in its text."""
        return self.anchor_R + self.offset_R

    def mask_RR(self) -> torch.Tensor:
        """A row (first axis) sees kept tokens up to its anchor, and its anchor's mask rows up to itself."""
        anchor, offset = self.anchor_R, self.offset_R
        kept = (offset == 0) & (anchor <= anchor[:, None])
        own = (anchor == anchor[:, None]) & (offset <= offset[:, None])
        return kept | own

    def ids_BR(self, ids_BS: torch.Tensor, pard_token: int) -> torch.Tensor:
        """The input: the text at kept rows, the mask token elsewhere."""
        return torch.where(self.offset_R == 0, ids_BS[:, self.anchor_R], pard_token)


def layout_of(length: int, anchors: Iterable[torch.Tensor]) -> Layout:
    """All tokens of a text of this length as kept rows, then the mask rows of the i-th tensor's anchors at offset i."""
    kept = torch.arange(length)
    masked = list(anchors)
    offsets = [torch.zeros_like(kept), *(torch.full_like(a, i) for i, a in enumerate(masked, 1))]
    return Layout(torch.cat([kept, *masked]), torch.cat(offsets))


def conditional_drop(length: int, k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Anchors that keep their i-th mask row, i from 1 to k - 1: ever fewer, each among those of i - 1."""
    anchors, kept = torch.arange(length), []
    for i in range(1, k):
        anchors = anchors[anchors + i < length]
        count = int(length * max(RATIO**i, LEAST))
        anchors = anchors[torch.randperm(len(anchors), generator=generator)[:count]]
        kept.append(anchors)
    return kept


def layout_logits(model: Qwen3ForCausalLM, ids_BS: torch.Tensor, layout: Layout, pard_token: int) -> torch.Tensor:
    """Logits (B, R, V) of one pass over the rows of the layout."""
    return model(
        layout.ids_BR(ids_BS, pard_token),
        attention_mask=layout.mask_RR()[None, None],
        position_ids=layout.position_R[None],
        use_cache=False,
    ).logits


class Parallel(Drafter):
    """A parallel draft that starts from the weights of a chain draft."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
        super().__init__()
        unused = tokenizer.token_to_id(UNUSED_TOKEN)
        assert unused is not None
        self.model, self.tokenizer, self.pard_token = model, tokenizer, unused
        model.config.pard_token = unused

    def hidden_matrices(self) -> Iterable[torch.nn.Parameter]:
        return self.model.model.layers.parameters()

    def loss(self, seen: TargetPass, generator: torch.Generator) -> torch.Tensor:
        """Mean KL(target || draft) over the kept rows and the mask rows that conditional drop leaves."""
        length = seen.ids_BS.shape[1]
        layout = layout_of(length, conditional_drop(length, K, generator))
        logits_BRV = layout_logits(self.model, seen.ids_BS, layout, self.pard_token)
        return distillation_loss(logits_BRV, seen.logits_BSV[:, layout.position_R])

    @torch.no_grad()
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        length = seen.ids_BS.shape[1]
        layout = layout_of(length, [anchors_A] * (k - 1))
        logits_RV = layout_logits(self.model, seen.ids_BS, layout, self.pard_token)[0]
        masked = logits_RV[length:].unflatten(0, (k - 1, len(anchors_A))).transpose(0, 1)
        return torch.cat([logits_RV[anchors_A][:, None], masked], dim=1)

    def save(self, folder: Path) -> None:
        """A plain Qwen3 folder whose config names the mask token as PARD and vLLM read it."""
        save(self.model, self.tokenizer, folder)
