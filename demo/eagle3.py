"""An EAGLE-3 head for the demo target: one layer that reads the target's features and chains its own states.

Li, Wei, Zhang, Zhang, "EAGLE-3: scaling up inference acceleration of large language models via training-time test"
(arXiv 2503.01840). Names and config are those of the speculators format, which vLLM loads (Llama layer, `d2t` as
offsets, `norm_before_residual`).
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from demo.drafter import Drafter, TargetPass, write_checkpoint
from demo.learn import distillation_loss, weighted_mean
from demo.models import ROPE_THETA, initialise_layers

# states before these layers of the target: low, middle, high
FEATURE_LAYERS = (1, 3, 5)
DRAFT_VOCAB = 1280
# training-time test: how many drafts are unrolled, for how many anchors a row, and the weight of each over the last
UNROLLED, ANCHORS, DECAY = 8, 96, 0.9
PROPOSAL = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
# fields that the head's layer takes from the target's config, and those of the layer in the speculators format
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias",
)  # fmt: skip
LAYER_KEYS = (*SHARED, "mlp_bias", "num_hidden_layers", "model_type", "tie_word_embeddings")
Rotary = tuple[torch.Tensor, torch.Tensor]
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Attention(nn.Module):
    """Attention of 2H inputs, embedding and feature beside each other, with the cache of the steps so far."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, x_BRE: torch.Tensor, rotary: Rotary, cache: Cache, mask_RS: torch.Tensor) -> torch.Tensor:
        """Rows join the cache and see the keys that mask_RS (R, S) shows."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BRE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        cache.append((k, v))
        keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*cache, strict=True))
        seen = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask_RS, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The head's decoder layer; its residual is the normed feature (`norm_before_residual`)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        norms = (nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms

    def forward(
        self, embeds_BRH: torch.Tensor, hidden_BRH: torch.Tensor, rotary: Rotary, cache: Cache, mask_RS: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output (B, R, H) before the final norm: the feature of the next step."""
        hidden = self.hidden_norm(hidden_BRH)
        attended = torch.cat([self.input_layernorm(embeds_BRH), hidden], dim=-1)
        hidden = hidden + self.self_attn(attended, rotary, cache, mask_RS)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(Drafter):
    """The weights, under the names of the speculators format."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: LlamaConfig, draft_vocab: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(FEATURE_LAYERS) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def target_ids_D(self) -> torch.Tensor:
        """The target's id of each draft id; `d2t` is the difference."""
        return torch.arange(len(self.d2t)) + self.d2t

    def unrolled(self, seen: TargetPass, anchors_A: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Logits of each draft: (B, S - 1, D) of the first after every token but row 0, then (B, A, D) a step.

        Row t joins the feature of token t with the embedding of token t + 1. An anchor is the position of the last
        kept token, so its row is the one before; later rows join the last step's state with the next token.
        """
        ids_BS, rows_A = seen.ids_BS, anchors_A - 1
        row_R = torch.arange(ids_BS.shape[1] - 1)
        hidden = self.fc(torch.cat([seen.hidden_LBSH[layer] for layer in FEATURE_LAYERS], dim=-1))[:, :-1]
        mask_RS, cache = row_R <= row_R[:, None], Cache()
        hidden = self._step(ids_BS[:, 1:], hidden, row_R, cache, mask_RS)
        yield self.lm_head(self.norm(hidden))
        mask_RS, hidden = mask_RS[rows_A], hidden[:, rows_A]
        own_AA = torch.eye(len(rows_A), dtype=torch.bool)
        for step in range(1, steps):
            mask_RS = torch.cat([mask_RS, own_AA], dim=1)
            hidden = self._step(ids_BS[:, anchors_A + step], hidden, rows_A + step, cache, mask_RS)
            yield self.lm_head(self.norm(hidden))

    def _step(
        self, ids_BR: torch.Tensor, hidden_BRH: torch.Tensor, position_R: torch.Tensor, cache: Cache, mask: torch.Tensor
    ) -> torch.Tensor:
        rotary = self.rotary(hidden_BRH, position_R[None])
        return self.layers[0](self.embed_tokens(ids_BR), hidden_BRH, rotary, cache, mask)

    def hidden_matrices(self) -> Iterable[nn.Parameter]:
        return [*self.layers.parameters(), *self.fc.parameters()]

    def loss(self, seen: TargetPass, generator: torch.Generator) -> torch.Tensor:
        """Weighted mean KL(target || draft) of the unrolled drafts, over the draft's vocabulary."""
        length = seen.ids_BS.shape[1]
        shuffled = torch.randperm(length - UNROLLED - 1, generator=generator)[:ANCHORS]
        anchors_A, teacher_BSD = shuffled + 1, seen.logits_BSV[..., self.target_ids_D]
        losses = []
        for step, logits in enumerate(self.unrolled(seen, anchors_A, UNROLLED)):
            teacher = teacher_BSD[:, anchors_A + step] if step else teacher_BSD[:, 1:]
            losses.append(distillation_loss(logits, teacher))
        return weighted_mean(losses, DECAY)

    @torch.no_grad()
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        """-inf for ids that it does not have."""
        first, *later = self.unrolled(seen, anchors_A, k)
        logits_AKD = torch.stack([first[0, anchors_A - 1], *(logits[0] for logits in later)], dim=1)
        logits_AKV = logits_AKD.new_full((*logits_AKD.shape[:2], self.config.vocab_size), float("-inf"))
        logits_AKV[..., self.target_ids_D] = logits_AKD
        return logits_AKV

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors of the speculators format, as RedHatAI's heads, in bfloat16."""
        layer = self.config.to_dict()
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
            "norm_before_residual": True,
            "norm_before_fc": False,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformer_layer_config": {name: layer[name] for name in LAYER_KEYS} | {"rope_theta": ROPE_THETA},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [PROPOSAL],
                "verifier": {"name_or_path": "demo/target", "architectures": ["Qwen3ForCausalLM"]},
            },
        }
        write_checkpoint(self, config, folder)


def head_config(target: Qwen3ForCausalLM) -> LlamaConfig:
    """The layer's shape: that of the target's layers."""
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    shared = {name: getattr(target.config, name) for name in SHARED}
    return LlamaConfig(num_hidden_layers=1, rope_parameters=rope, tie_word_embeddings=False, **shared)


def new_head(target: Qwen3ForCausalLM, text_RS: torch.Tensor) -> Eagle3:
    """A head before training: the target's embeddings (they stay), norm and rows of its projection."""
    head = Eagle3(head_config(target), DRAFT_VOCAB)
    counts_V = torch.bincount(text_RS.flatten(), minlength=target.config.vocab_size)
    ids_D = counts_V.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values
    head.d2t.copy_(ids_D - torch.arange(DRAFT_VOCAB))
    head.t2d[ids_D] = True
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[ids_D])
        initialise_layers(head.layers)
        nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
    head.embed_tokens.weight.requires_grad_(False)
    return head


def load_head(folder: Path) -> Eagle3:
    """A saved head in float32."""
    config = json.loads((folder / "config.json").read_text())
    layer = dict(config["transformer_layer_config"])
    rope = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    layer.pop("model_type")
    head = Eagle3(LlamaConfig(**layer, rope_parameters=rope), config["draft_vocab_size"])
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.train(False)
