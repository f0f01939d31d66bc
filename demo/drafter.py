"""The drafters' common ground: what they see of a target pass, and the methods by which they are trained."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

# drafts a step for which the drafters are trained
K = 16


class TargetPass(NamedTuple):
    """One pass of the target over rows of text, without gradients.

    `hidden_LBSH` are the states before each layer (the first: the embeddings), `last_BSH` those after the final norm.
    """

    ids_BS: torch.Tensor
    hidden_LBSH: tuple[torch.Tensor, ...]
    last_BSH: torch.Tensor
    logits_BSV: torch.Tensor


class Drafter(torch.nn.Module, ABC):
    """A drafter of any kind, as it is trained."""

    @abstractmethod
    def hidden_matrices(self) -> Iterable[torch.nn.Parameter]:
        """The weights whose matrices Muon updates; AdamW has the rest."""

    @abstractmethod
    def loss(self, seen: TargetPass, generator: torch.Generator) -> torch.Tensor:
        """The training loss on rows of the target's text."""

    @abstractmethod
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        """Logits (A, k, V) of the k drafts after each anchor, the position of the last kept token, of one row.

        A drafter that reads its own drafts gets those that the target accepts: the text.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the checkpoint in its public format."""


@torch.no_grad()
def target_pass(target: Qwen3ForCausalLM, ids_BS: torch.Tensor) -> TargetPass:
    """The target's pass over these rows, as a drafter may see it."""
    output = target(ids_BS, output_hidden_states=True, use_cache=False)
    # the last of them has been through the final norm
    *hidden_LBSH, last_BSH = output.hidden_states
    return TargetPass(ids_BS, tuple(hidden_LBSH), last_BSH, output.logits)


def write_checkpoint(module: torch.nn.Module, config: Mapping[str, object], folder: Path) -> None:
    """Write config.json and model.safetensors, its floating-point weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: w.bfloat16() if w.is_floating_point() else w for n, w in module.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
