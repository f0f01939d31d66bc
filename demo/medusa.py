"""Medusa heads for the demo target: residual blocks on its last hidden state, one for each draft, and one projection.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774).
Names and config are those of vLLM's loader; `original_lm_head` there shares one projection, the target's own.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from demo.drafter import Drafter, K, TargetPass, write_checkpoint
from demo.learn import distillation_loss, weighted_mean

LAYERS = 2
# training: positions a row, and the weight of each draft over the one before
ANCHORS, DECAY = 48, 0.9


class Block(nn.Module):
    """Residual layers x + silu(W x); they begin as the identity."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class Medusa(Drafter):
    """The weights: `blocks.<head>.layers.<layer>.weight`, and the shared projection as `lm_heads.0.weight`."""

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, layers) for _ in range(heads))
        self.lm_heads = nn.ModuleList([nn.Linear(hidden, vocabulary, bias=False)])
        self.shape = {"vocab_size": vocabulary, "hidden_size": hidden, "num_heads": heads, "num_hidden_layers": layers}

    def forward(self, last_BRH: torch.Tensor, k: int) -> torch.Tensor:
        """Logits (B, R, k, V) of the k drafts after each row's next token."""
        states_BRKH = torch.stack([block(last_BRH) for block in list(self.blocks)[:k]], dim=2)
        return functional.linear(states_BRKH, self.get_parameter("lm_heads.0.weight"))

    def hidden_matrices(self) -> Iterable[nn.Parameter]:
        return self.blocks.parameters()

    def loss(self, seen: TargetPass, generator: torch.Generator) -> torch.Tensor:
        """Weighted mean KL(target || head) over random positions."""
        length = seen.ids_BS.shape[1]
        anchors_A = torch.randperm(length - K - 1, generator=generator)[:ANCHORS] + 1
        logits_BAKV = self(seen.last_BSH[:, anchors_A - 1], K)
        teachers = [seen.logits_BSV[:, anchors_A + n] for n in range(K)]
        return weighted_mean([distillation_loss(logits_BAKV[:, :, n], t) for n, t in enumerate(teachers)], DECAY)

    @torch.no_grad()
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        """From the state before each anchor."""
        return self.forward(seen.last_BSH[:, anchors_A - 1], k)[0]

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors as vLLM reads them, in bfloat16."""
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **self.shape,
            "truncated_vocab_size": self.shape["vocab_size"],
            "medusa_fc_bias": False,
            "original_lm_head": True,
            "torch_dtype": "bfloat16",
        }
        write_checkpoint(self, config, folder)


def new_heads(target: Qwen3ForCausalLM) -> Medusa:
    """Heads before training: each gives the logits of the target's own projection, which stays."""
    heads = Medusa(target.config.vocab_size, target.config.hidden_size, K, LAYERS)
    heads.lm_heads.requires_grad_(False)
    heads.get_parameter("lm_heads.0.weight").copy_(target.lm_head.weight.detach())
    return heads


def load_heads(folder: Path) -> Medusa:
    """Saved heads in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads = Medusa(config["vocab_size"], config["hidden_size"], config["num_heads"], config["num_hidden_layers"])
    heads.load_state_dict(load_file(folder / "model.safetensors"))
    return heads.train(False)
