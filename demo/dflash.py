"""DFlash drafts for the demo target: a block of masks over the target's states, in one pass, with a Markov head or not.

Chen, Liang, Liu, "DFlash: block diffusion for flash speculative decoding" (arXiv 2602.06036), and DSpark's Markov head
(deepseek-ai/DeepSpec). Names and config are z-lab's; with a head they are SpecForge's, whose rows are shifted: row j
then is the draft of the position after its own. Training puts the blocks of many anchors into one pass.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from demo.drafter import Drafter, TargetPass, write_checkpoint
from demo.models import ROPE_THETA

# outputs of these layers of the target, as z-lab counts them
LAYER_IDS = (0, 2, 4)
LAYERS, INNER, RANK = 2, 384, 32
# the token of byte 0xFF, as the parallel draft's mask
MASK_ID = 188
# rows of a block, and the drafts of a training pass's blocks: a step's k
BLOCK, DRAFTS = 16, (3, 7, 15)
# block rows of one row of text in a training pass
ROWS = 512
# of the loss: the share of an overlap that counts, and the weight of rows without their Markov head's bias
SURE, UNBIASED = 0.75, 0.2
SHARED = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "hidden_act", "attention_bias", "bos_token_id", "eos_token_id",
)  # fmt: skip
Rotary = tuple[torch.Tensor, torch.Tensor]


def rotated(x_BHRD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Queries or keys at their positions."""
    cos, sin = (part[:, None] for part in rotary)
    return x_BHRD * cos + rotate_half(x_BHRD) * sin


class Attention(nn.Module):
    """Queries of block rows; keys and values of the context and of the row's own block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in "qk")

    def forward(
        self, x_BRH: torch.Tensor, context_BSH: torch.Tensor, rotary: tuple[Rotary, Rotary], before_AS: torch.Tensor
    ) -> torch.Tensor:
        """Rotations of the block's rows and of all; `before_AS` shows a block its context."""
        all_BXH, (blocks, length) = torch.cat([context_BSH, x_BRH], dim=1), before_AS.shape
        projected = (self.q_proj(x_BRH), self.k_proj(all_BXH), self.v_proj(all_BXH))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        q, k = rotated(self.q_norm(q), rotary[0]), rotated(self.k_norm(k), rotary[1])
        # rows of all query heads of a key head, block by block: no block is multiplied by another's keys
        q_BGhAND = q.unflatten(1, (k.shape[1], -1)).unflatten(3, (blocks, -1)) * self.head_dim**-0.5
        q_BGAXD = q_BGhAND.transpose(2, 3).flatten(3, 4)
        (k_BGSD, own_k), (v_BGSD, own_v) = ((y[:, :, :length], y[:, :, length:]) for y in (k, v))
        k_BGAND, v_BGAND = (y.unflatten(2, (blocks, -1)) for y in (own_k, own_v))
        context_BGAXS = (q_BGAXD.flatten(2, 3) @ k_BGSD.transpose(2, 3)).unflatten(2, (blocks, -1))
        context_BGAXS = context_BGAXS.masked_fill(~before_AS[:, None], float("-inf"))
        shares = torch.cat([context_BGAXS, q_BGAXD @ k_BGAND.transpose(3, 4)], dim=-1).softmax(-1)
        seen = (shares[..., :length].flatten(2, 3) @ v_BGSD).unflatten(2, (blocks, -1)) + shares[..., length:] @ v_BGAND
        of_heads = seen.unflatten(3, (q_BGhAND.shape[2], -1)).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(of_heads.flatten(3).flatten(1, 2))


class Layer(nn.Module):
    """A decoder layer over block rows."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Qwen3MLP(config)
        norms = (Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(
        self, x_BRH: torch.Tensor, context_BSH: torch.Tensor, rotary: tuple[Rotary, Rotary], before_AS: torch.Tensor
    ) -> torch.Tensor:
        """The rows after the layer; the context stays as it is."""
        x_BRH = x_BRH + self.self_attn(self.input_layernorm(x_BRH), context_BSH, rotary, before_AS)
        return x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))


class MarkovHead(nn.Module):
    """A bias of an id's logits by the id before it."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocabulary, rank), nn.Linear(rank, vocabulary, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """(..., V) of ids (...)."""
        return self.markov_w2(self.markov_w1(before))


class DFlash(Drafter):
    """The weights, under z-lab's names; the target's embeddings and head, which stay, are not among them."""

    embed_VH: torch.Tensor
    head_VH: torch.Tensor

    def __init__(self, config: Qwen3Config, rank: int, embed_VH: torch.Tensor, head_VH: torch.Tensor) -> None:
        super().__init__()
        # rows without a draft: the first one of a block in place
        self.config, self.idle = config, int(not rank)
        self.fc = nn.Linear(len(LAYER_IDS) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(config.vocab_size, rank) if rank else None
        self.rotary = Qwen3RotaryEmbedding(config)
        # no parameters: what is trained is what is saved
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.register_buffer("head_VH", head_VH, persistent=False)

    def block_logits(self, seen: TargetPass, anchors_A: torch.Tensor, rows: int) -> torch.Tensor:
        """(B, A, rows - idle, V) of the drafts of a block at each anchor, before a Markov head."""
        ids_BS, own_N = seen.ids_BS, torch.arange(rows)
        length, position_AN = ids_BS.shape[1], anchors_A[:, None] + own_N
        states = torch.cat([seen.hidden_LBSH[i + 1] for i in LAYER_IDS], dim=-1)
        context_BSH = self.hidden_norm(self.fc(states))
        ids_BAN = ids_BS[:, anchors_A, None].where(own_N == 0, torch.tensor(MASK_ID))
        x_BRH = functional.embedding(ids_BAN, self.embed_VH).flatten(1, 2)
        before_AS = torch.arange(length) < anchors_A[:, None]
        position_R = position_AN.flatten()
        positions = (position_R, torch.cat([torch.arange(length), position_R]))
        own, every = (self.rotary(x_BRH, p[None]) for p in positions)
        for layer in self.layers:
            x_BRH = layer(x_BRH, context_BSH, (own, every), before_AS)
        x_BANH = self.norm(x_BRH).unflatten(1, (-1, rows))[:, :, self.idle :]
        return functional.linear(x_BANH, self.head_VH)

    def biased(self, logits: torch.Tensor, ids_BS: torch.Tensor, anchors_A: torch.Tensor) -> torch.Tensor:
        """These logits with the bias of a Markov head, which reads the text."""
        if self.markov_head is None:
            return logits
        position_AN = anchors_A[:, None] + torch.arange(logits.shape[2])
        return logits + self.markov_head(ids_BS[:, position_AN.clamp(max=ids_BS.shape[1] - 1)])

    def hidden_matrices(self) -> Iterable[nn.Parameter]:
        return [*self.layers.parameters(), *self.fc.parameters()]

    def loss(self, seen: TargetPass, generator: torch.Generator) -> torch.Tensor:
        """KL(target || draft) of blocks at random anchors, each draft's times the chance that those before it are kept.

        That chance is the product of both laws' overlaps, smoothed as in D-PACE (arXiv 2605.18810): text that is hard
        to guess teaches the first drafts, text that is not teaches all. With a Markov head later rows alone learn the
        same law too, with a small weight, since they choose the ids that get the head's bias.
        """
        drafts = DRAFTS[int(torch.randint(len(DRAFTS), (), generator=generator))]
        rows = drafts + self.idle
        anchors_A = torch.randperm(seen.ids_BS.shape[1] - rows - 1, generator=generator)[: ROWS // rows] + 1
        teacher_BANV = seen.logits_BSV[:, anchors_A[:, None] + torch.arange(drafts)].log_softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.block_logits(seen, anchors_A, rows)
            biased = self.biased(logits, seen.ids_BS, anchors_A)
        divergence_BAN, overlap_BAN = compared(biased, teacher_BANV)
        if self.markov_head is not None:
            alone_BAN, _ = compared(logits[:, :, 1:], teacher_BANV[:, :, 1:])
            divergence_BAN = divergence_BAN + UNBIASED * functional.pad(alone_BAN, (1, 0))
        kept_BAN = functional.pad(1 - SURE * (1 - overlap_BAN[..., :-1]), (1, 0), value=1.0).cumprod(-1)
        return (kept_BAN * divergence_BAN).sum(-1).mean()

    @torch.no_grad()
    def draft_logits(self, seen: TargetPass, anchors_A: torch.Tensor, k: int) -> torch.Tensor:
        """Of a block of as many rows as k drafts need; zeros past the largest block's end."""
        logits = self.block_logits(seen, anchors_A, min(k + self.idle, BLOCK))
        logits = self.biased(logits, seen.ids_BS, anchors_A)[0]
        return functional.pad(logits, (0, 0, 0, k - logits.shape[1]))

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors of z-lab's format, with a head of SpecForge's, in bfloat16."""
        whole = self.config.to_dict()
        own: dict[str, object] = {"mask_token_id": MASK_ID, "target_layer_ids": list(LAYER_IDS)}
        if self.markov_head is not None:
            head = {"markov_rank": self.markov_head.markov_w1.embedding_dim, "markov_head_type": "vanilla"}
            own |= {"projector_type": "dspark", **head}
        config = {name: whole[name] for name in (*SHARED, "intermediate_size", "num_hidden_layers")} | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "dflash_config": own,
            "num_target_layers": 6,
            "layer_types": ["full_attention"] * self.config.num_hidden_layers,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        write_checkpoint(self, config, folder)


def compared(logits_BANV: torch.Tensor, teacher_BANV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, A, N) each: KL(target || draft) in nats, and the overlap of the two laws, without a gradient."""
    draft_BANV = logits_BANV.float().log_softmax(-1)
    divergence_BAN = functional.kl_div(draft_BANV, teacher_BANV, log_target=True, reduction="none").sum(-1)
    return divergence_BAN, torch.minimum(draft_BANV.detach(), teacher_BANV).exp().sum(-1)


def new_draft(target: Qwen3ForCausalLM, rank: int = 0) -> DFlash:
    """A draft before training: its layers are the target's last ones, over the state that the last of them reads."""
    shared = {name: getattr(target.config, name) for name in SHARED}
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config = Qwen3Config(num_hidden_layers=LAYERS, intermediate_size=INNER, rope_parameters=rope, **shared)
    draft = DFlash(config, rank, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    with torch.no_grad():
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.hidden_norm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
        draft.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1)
        for own, theirs in zip(draft.layers, target.model.layers[-LAYERS:], strict=True):
            _begin(own, theirs)
    return draft


def _begin(own: nn.Module, theirs: nn.Module) -> None:
    """A layer as a layer of the target, with those inner features of its MLP that have the largest weights."""
    weights = theirs.state_dict()
    size_I = weights["mlp.up_proj.weight"].norm(dim=1) * weights["mlp.down_proj.weight"].norm(dim=0)
    kept_I = size_I.topk(INNER).indices.sort().values
    for part in ("gate", "up"):
        weights[f"mlp.{part}_proj.weight"] = weights[f"mlp.{part}_proj.weight"][kept_I]
    weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"][:, kept_I]
    own.load_state_dict(weights)


def load_draft(folder: Path, target: Qwen3ForCausalLM) -> DFlash:
    """A saved draft in float32, with its target's embeddings and head."""
    config = json.loads((folder / "config.json").read_text())
    draft = new_draft(target, config["dflash_config"].get("markov_rank", 0))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.train(False)
