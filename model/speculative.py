"""The fused speculative step: k drafts, verify k + 1 rows, emit the target's own draws.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978). The outputs keep
the order of NxDI's fused graphs: accepted ids, next id, next mask, next position, state.
Shapes: B sequences, k drafts, N = k + 1 candidate rows of a sequence, S cache positions, M shards of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import KEY_TILE
from model.cache import Cache, Copies, Placement
from model.drafters import Drafter, DraftState, Prompt, Verified
from model.filters import GUESSED_STEPS
from model.graph_io import DraftOutputs, Outputs, StepInputs, StepOutputs
from model.ops import Ops, iota
from model.qwen3 import Qwen3
from model.rank_model import RankModel
from model.sampling import Draw, Sampling, allowed_ids
from model.tree import Tree
from model.window import Window


class Pair(nn.Module):
    """A target and its drafter, built on the same operations; with a tree its steps verify one, not a chain.

    `copies` are the target's caches of each sequence: as many as the largest tree of the build has paths.
    """

    def __init__(self, target: Qwen3, drafter: Drafter, ops: Ops, tree: Tree | None = None, copies: int = 1) -> None:
        super().__init__()
        self.target_model, self.draft_model, self.drafter, self.ops = target, drafter.model, drafter, ops
        self.tree, self.copies = tree, Copies(copies, target.backing.layout)

    def forward(self, stage: Callable[..., Outputs], *args: Any) -> Outputs:
        """Run a stage: `Pair.step`, its halves `Pair.draft` and `Pair.verify`, or `Pair.prefill`.

        `torch.func.functional_call`, by which a graph's weights take the place of these parameters, calls `forward`
        and nothing else.
        """
        return stage(self, *args)

    def step(
        self,
        k: int,
        inputs: StepInputs,
        draft_state: DraftState,
        target_caches: list[Cache],
        filters: bool = True,
    ) -> StepOutputs:
        """One step of every sequence: k drafts, N = k + 1 verified rows, 1 .. N emitted ids.

        Where none of the sequences filters, the host picks a graph of a stage without `filters`: no graph has a branch.
        Drafter and target draw with the same noise at the same position. A draft is accepted while the two draws are
        equal; what is emitted is the target's own draw. So the text is the target's, whatever the drafter.
        """
        position_B1, bucket = inputs.position_ids[:, :1], inputs.attention_mask.shape[1]
        window = Window.of(k, position_B1, bucket, self.tree, self.copies)
        asked = inputs.sampling if filters else inputs.sampling.unfiltered()
        of_target, of_draft = self._prepared(asked, window.placement.positions_BN + 1)
        candidates_BN, draft_state = self.drafter.propose(window, inputs.input_ids, of_draft, draft_state)
        draw = _allowing(self.target_model, window.target_draw(of_target), inputs.allowed)
        return self._verify(window, candidates_BN, draw, inputs.k_limits, draft_state, target_caches)

    def draft(
        self,
        k: int,
        inputs: StepInputs,
        draft_state: DraftState,
        target_caches: list[Cache],
        filters: bool = True,
    ) -> DraftOutputs:
        """A step's first half alone, for a host that runs the second: the candidates.

        With masks, a row's draft is one that its mask allows.
        """
        draft = self.draft_model
        assert draft is not None, "a drafter without a model has no graph of its own"
        window = Window.of(k, inputs.position_ids[:, :1], inputs.attention_mask.shape[1])
        asked = inputs.sampling if filters else inputs.sampling.unfiltered()
        draw = draft.kernels.prepare(self.ops, asked, window.placement.positions_BN + 1, draft.shard)
        draw = _allowing(draft, _guessing(draw), inputs.allowed)
        candidates_BN, draft_state = self.drafter.propose(window, inputs.input_ids, draw, draft_state)
        return DraftOutputs(candidates_BN, draft_state)

    def verify(
        self,
        k: int,
        inputs: StepInputs,
        draft_state: DraftState,
        target_caches: list[Cache],
        filters: bool = True,
    ) -> StepOutputs:
        """A step's second half alone: the input ids are its candidates, each row's draw one that its mask allows."""
        target = self.target_model
        window = Window.of(k, inputs.position_ids[:, :1], inputs.attention_mask.shape[1])
        asked = inputs.sampling if filters else inputs.sampling.unfiltered()
        draw = target.kernels.prepare(self.ops, asked, window.placement.positions_BN + 1, target.shard)
        draw = _allowing(target, draw, inputs.allowed)
        return self._verify(window, inputs.input_ids, draw, inputs.k_limits, draft_state, target_caches)

    def _verify(
        self,
        window: Window,
        candidates_BN: Tensor,
        draw: Draw,
        k_limits_B: Tensor,
        draft_state: DraftState,
        target_caches: list[Cache],
    ) -> StepOutputs:
        """The target's pass over the candidates, and what it keeps of them."""
        target = self.target_model
        draws, target_caches, features_BNF = self.ops.call(
            target, window.padded(candidates_BN), target_caches, window.target_rows(), draw
        )
        draws, limit_B = window.cut(draws), window.limit(k_limits_B, target.length(target_caches))
        walk = window.walk(target.kernels, self.ops, candidates_BN, draws, limit_B)
        target_caches = window.kept(self.ops, target_caches, walk)
        features_BLF = None if features_BNF is None else walk.of(features_BNF)
        verified = Verified(window, walk.of(candidates_BN), walk.count_B1, walk.next_B1, features_BLF)
        draft_state = self.drafter.keep(verified, draft_state)
        next_pos = window.placement.positions_BN[:, :1] + walk.count_B1
        scores = None if draws.scores is None else walk.of(draws.scores.permute(1, 2, 0))
        emitted, next_mask = walk.accepted_BL, window.mask(next_pos)
        return StepOutputs(emitted, walk.next_B1, next_mask, next_pos, draft_state, target_caches, scores)

    def _prepared(self, asked: Sampling, positions_BN: Tensor) -> tuple[Draw, Draw]:
        """What the target and the draft draw with at a step's positions: the same noise where their shards are the
        same; the draft guesses what its filters keep, for its draws have no say in what is emitted."""
        target, draft = self.target_model, self.draft_model
        prepared = of_draft = target.kernels.prepare(self.ops, asked, positions_BN, target.shard)
        if draft is not None and (draft.shard.ids_V is not None or draft.shard.width != target.shard.width):
            of_draft = draft.kernels.prepare(self.ops, asked, positions_BN, draft.shard)
        others_J = iota(self.tree.width - 1, positions_BN) if self.tree and self.tree.width > 1 else None
        return prepared, _guessing(of_draft)._replace(others_J=others_J)

    def prefill(self, k: int, inputs: StepInputs, draft_state: DraftState, target_caches: list[Cache]) -> StepOutputs:
        """A prompt of one sequence into its slot of both models' state, and its first token."""
        target, kernels = self.target_model, self.target_model.kernels
        length_B = inputs.attention_mask.sum(-1).to(torch.int32)
        # a prompt shorter than a tile of keys has fewer rows, and sees one tile
        rows = inputs.attention_mask.shape[1]
        keys_S = iota(max(rows, KEY_TILE), length_B)
        placement = Placement(keys_S[None, :rows], keys_S, inputs.seq_ids)
        one = placement._replace(slots_B=self.copies.one(inputs.seq_ids))
        x_BSE, target_caches, features_BSF = target.tapped(inputs.input_ids, target_caches, one)
        of_slot = (inputs.seq_ids, torch.zeros_like(inputs.seq_ids), placement.positions_BN)
        target_caches = [self.copies.alike(self.ops, cache, *of_slot) for cache in target_caches]
        last_BE = x_BSE[iota(1, length_B), length_B - 1]
        # the first token's position is the prompt's length
        draw = kernels.prepare(self.ops, inputs.sampling, length_B[:, None], target.shard)
        draws = kernels.coupled_sample(self.ops, target.logits(last_BE), _allowing(target, draw, inputs.allowed))
        token_B1 = draws.merged()[:, None]
        draft_state = self.drafter.prompt(
            Prompt(inputs.input_ids, placement, length_B, token_B1, features_BSF), draft_state
        )
        accepted_BN = torch.where(iota(k + 1, length_B) == 0, token_B1, -1)
        next_pos = length_B[:, None]
        next_mask = (iota(target.length(target_caches), length_B) < next_pos).to(torch.int32)
        scores = None if draws.scores is None else draws.scores.T[:, None].repeat(1, k + 1, 1)
        return StepOutputs(accepted_BN, token_B1, next_mask, next_pos, draft_state, target_caches, scores)


def _guessing(draw: Draw) -> Draw:
    """A draft's draw: what its filters keep is guessed, for it has no say in what is emitted."""
    return draw._replace(guess_J=torch.tensor(GUESSED_STEPS, device=draw.position_R.device))


def _allowing(model: RankModel, draw: Draw, words: Tensor | None) -> Draw:
    """A model's draw with what masks allow, if there are any: (B, W) for all rows of a sequence, (B, N, W) for each."""
    if words is None:
        return draw
    shard, words_RW = model.shard, words.flatten(0, -2)
    if shard.ids_V is None:
        first_11 = None if shard.width == model.config.vocab_size else shard.start
        allowed_RV = allowed_ids(words_RW, first_11, shard.width)
    else:
        allowed_RV = allowed_ids(words_RW, None, model.config.vocab_size).index_select(1, shard.ids_V)
    return draw._replace(allowed_RV=allowed_RV.repeat_interleave(len(draw.position_R) // len(words_RW), 0))
