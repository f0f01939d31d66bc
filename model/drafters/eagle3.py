"""EAGLE-3: a head of one layer reads the target's own states, and chains its own where these end.

Li, Wei, Zhang, Zhang, arXiv 2503.01840; names and details as vLLM loads them (vllm/model_executor/models/
llama_eagle3.py, vllm/v1/spec_decode/eagle.py). Row j joins the target's states of token j, projected by `fc`, with
the embedding of token j + 1, at position j; its output x[j] gives the logits of token j + 2:

    x[j] = layer(embed(token[j + 1]), fc(target states[j]))         while token j is the target's
    x[j] = layer(embed(token[j + 1]), x[j - 1])                     for drafts

`keep` has the target's states of all N verified rows and runs the layer over them, before it is known to the host how
many are kept: rows past the last kept one hold garbage, at positions p + count and on, where p + count is the next
input id's. It remembers x of the last kept row, of which `propose` draws the first draft; its k - 1 passes of one row
write positions p', p' + 1, ... before they see them, and `keep` writes all of these anew. So no row ever sees what was
not kept.

The head's vocabulary is a part of the target's: it draws among its own D ids, with the noise of the target's ids that
they stand for, and what it has drawn is looked up. Ranks hold a part of D, and of fc's outputs. Shapes: B sequences,
N rows, E the head's hidden size, F the tapped states, D the draft's ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.backing import Backing
from model.cache import Cache, Placement
from model.draft_config import Eagle3Config
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot, rows_of
from model.kernels import Kernels
from model.ops import iota
from model.parallel import ONE_RANK, ColumnLinear, Embedding, Head, Parallel, Shard
from model.qwen3 import MLP, REFERENCE, Attention, RMSNorm, rope_angles
from model.rank_model import RankModel
from model.sampling import Draw
from model.window import Window


class JoinedAttention(Attention):
    """Attention whose rows are an embedding and a feature beside each other, and are not normed by head."""

    def __init__(self, config: Eagle3Config, parallel: Parallel, kernels: Kernels) -> None:
        super().__init__(config, parallel, kernels)
        for name, plain in (("q_proj", self.q_proj), ("k_proj", self.k_proj), ("v_proj", self.v_proj)):
            self.add_module(name, ColumnLinear(2 * config.hidden_size, plain.weight.shape[0]))
        for name in ("q_norm", "k_norm"):
            self.add_module(name, nn.Identity())


class HeadLayer(nn.Module):
    """The decoder layer of a head: what it adds to is the feature, normed first or not, as the head was trained."""

    def __init__(self, config: Eagle3Config, parallel: Parallel, backing: Backing) -> None:
        super().__init__()
        self.kind = config
        norms = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn = JoinedAttention(config, parallel, backing.kernels)
        self.mlp: MLP = backing.mlp(config, parallel)

    def forward(
        self, embeds_BNE: Tensor, x_BNE: Tensor, angles: Tensor, cache: Cache, placement: Placement
    ) -> tuple[Tensor, Cache]:
        normed_BNE = self.hidden_norm(x_BNE)
        joined = torch.cat((self.input_layernorm(embeds_BNE), normed_BNE), -1)
        attended, cache = self.self_attn(joined, angles, cache, placement)
        x_BNE = attended + (normed_BNE if self.kind.norm_before_residual else x_BNE)
        return x_BNE + self.mlp.normed(self.post_attention_layernorm, x_BNE), cache


class Eagle3Draft(RankModel):
    """The head of one rank."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        hidden, tp, ops = config.hidden_size, parallel.tp, parallel.ops
        self.embed_tokens = Embedding(config.vocab_size, hidden // tp, ops)
        self.fc = ColumnLinear(len(config.taps) * config.target_hidden_size, hidden // tp)
        self.layers = nn.ModuleList([HeadLayer(config, parallel, backing)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        of_head = parallel.of_head
        self.lm_head = Head(hidden, config.draft_vocab_size // of_head.tp, of_head.ops, backing.sharded)
        if config.draft_vocab_size < config.vocab_size:
            # what to add to each of the draft's ids
            self.d2t = nn.Parameter(torch.zeros(config.draft_vocab_size, dtype=torch.int32), requires_grad=False)

    @property
    def target_ids_D(self) -> Tensor:
        """(D,) int32: the target's id of each of the draft's."""
        own_D = iota(self.config.draft_vocab_size, self.rank_util.rank)
        return own_D + self.d2t if hasattr(self, "d2t") else own_D

    @property
    def shard(self) -> Shard:
        own = self.shard_of(self.config.draft_vocab_size)
        ids_V = own.start[0] + iota(own.width, own.start)
        return own._replace(ids_V=self.target_ids_D.index_select(0, ids_V)) if hasattr(self, "d2t") else own

    def feature(self, states_BNF: Tensor) -> Tensor:
        """(B, N, E) of the target's states at the taps."""
        return self.parallel.ops.all_gather(self.fc(states_BNF))

    def hidden(
        self, next_BN: Tensor, x_BNE: Tensor, caches: list[Cache], placement: Placement
    ) -> tuple[Tensor, list[Cache]]:
        """(B, N, E) after the layer, of features and the ids that follow theirs, and the cache with these rows."""
        placement = self.on_rank(placement)
        angles = rope_angles(placement.positions_BN, self.config.head_dim, self.config.rope_theta)
        x_BNE, cache = self.parallel.ops.call(
            self.layers[0], self.embed_tokens(next_BN), x_BNE, angles, caches[0], placement
        )
        return x_BNE, [cache]

    def logits(self, x_BNE: Tensor) -> Tensor:
        """(B, N, D) fp32 logits of the draft's ids, of this rank's alone if the kernels draw from shards."""
        logits: Tensor = self.lm_head(self.norm(x_BNE))
        return logits

    def drawn(self, x_B1E: Tensor, draw: Draw) -> Tensor:
        """(C, B, 1) the target's ids that are drawn after a row of each sequence, best first."""
        draws = self.kernels.coupled_sample(self.head_ops, self.logits(x_B1E).flatten(0, 1), draw)
        return self.target_ids_D[draws.ranked()].unsqueeze(-1)

    def forward(
        self, next_B1: Tensor, x_B1E: Tensor, caches: list[Cache], placement: Placement, draw: Draw
    ) -> tuple[Tensor, Tensor, list[Cache]]:
        """What is drawn after the last draft, its row's output and the cache."""
        x_B1E, caches = self.hidden(next_B1, x_B1E, caches, placement)
        return self.drawn(x_B1E, draw), x_B1E, caches


class Eagle3(Drafter):
    """A head on the target's states; it remembers its output at the last kept row."""

    model: Eagle3Draft

    def __init__(self, model: Eagle3Draft) -> None:
        self.model, self.taps = model, model.config.taps

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, caches, (x_B1E,) = self.model, state.caches, state.kept
        _, of_row = window.row(0, draw)
        drafts_CB1 = [model.drawn(x_B1E, of_row)]
        for n in range(1, window.k):
            # the row of a draft is at the position before it
            (placement, _), (_, of_row) = window.row(n - 1, draw), window.row(n, draw)
            drafted_CB1, x_B1E, caches = model.parallel.ops.call(
                model, drafts_CB1[-1][0], x_B1E, caches, placement, of_row
            )
            drafts_CB1.append(drafted_CB1)
        return window.candidates(ids_BT, torch.cat(drafts_CB1, -1)), DraftState(caches, state.kept)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        placement, rows = verified.window.placement, verified.window.k + 1
        placement = placement._replace(positions_BN=placement.positions_BN[:, :rows])
        next_BN = _following(verified.candidates_BN, verified.count_B1, verified.next_B1)
        last_B1E, caches = self._rows(next_BN, verified.features_BNF, verified.count_B1, state.caches, placement)
        return DraftState(caches, (last_B1E,))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        length_11, slot_1 = prompt.length_1[:, None], prompt.placement.slots_B
        next_1S = _following(prompt.ids_1S, length_11, prompt.token_11)
        last_11E, caches = self._rows(next_1S, prompt.features_1SF, length_11, state.caches, prompt.placement)
        assert slot_1 is not None
        return DraftState(caches, (in_slot(state.kept[0], last_11E, slot_1),))

    def _rows(
        self, next_BN: Tensor, states_BNF: Tensor | None, count_B1: Tensor, caches: list[Cache], placement: Placement
    ) -> tuple[Tensor, list[Cache]]:
        """(B, 1, E) the last of the first `count` rows of the target's states, and the cache with all rows written."""
        assert states_BNF is not None, "a head reads the target's states"
        x_BNE, caches = self.model.hidden(next_BN, self.model.feature(states_BNF), caches, placement)
        return rows_of(x_BNE, count_B1 - 1), caches


def _following(ids_BN: Tensor, count_B1: Tensor, next_B1: Tensor) -> Tensor:
    """(B, N) the id after each of the first `count` ids; those after are of no matter."""
    shifted_BN = torch.cat((ids_BN[:, 1:], next_B1), 1)
    return torch.where(iota(ids_BN.shape[1], count_B1) == count_B1 - 1, next_B1, shifted_BN)
