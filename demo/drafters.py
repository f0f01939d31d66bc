"""Every drafter of the demo: how one is begun, and how a trained one is loaded, from a folder of model folders."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from demo.drafter import Drafter, TargetPass
from demo.eagle3 import Eagle3, load_head, new_head
from demo.medusa import Medusa, load_heads, new_heads
from demo.models import load
from demo.parallel import Parallel


class Chain:
    """The chain draft: draft i reads the text before it, the drafts that were accepted among it."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model

    @torch.no_grad()
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        """Logits (A, k, V) of the k drafts after each anchor of one row."""
        return self.model(seen.ids_BS, use_cache=False).logits[0][anchors_A[:, None] + torch.arange(k)]


# of the models, the target and its text
NEW: dict[str, Callable[[Path, Qwen3ForCausalLM, torch.Tensor], Drafter]] = {
    "parallel": lambda models, target, text: Parallel(*load(models / "draft")),
    "eagle3": lambda models, target, text: Eagle3(new_head(target, text)),
    "medusa": lambda models, target, text: Medusa(new_heads(target)),
}
TRAINED: dict[str, Callable[[Path], Drafter]] = {
    "parallel": lambda models: Parallel(*load(models / "draft_parallel")),
    "eagle3": lambda models: load_head(models / "draft_eagle3"),
    "medusa": lambda models: load_heads(models / "draft_medusa"),
}


def load_proposer(name: str, models: Path) -> Chain | Drafter:
    """A trained drafter, or the chain draft."""
    return Chain(load(models / "draft")[0]) if name == "chain" else TRAINED[name](models)
