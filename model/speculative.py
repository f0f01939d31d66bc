"""The fused speculative step: draft k tokens, verify k + 1 rows, emit the target's own draws.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978). The outputs keep
the order of NxDI's fused graphs: accepted ids, next id, next mask, next position, caches.
Shapes: B sequences, k drafts, N = k + 1 candidate rows of a sequence, S cache positions, M shards of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import Cache, Placement
from model.filters import GUESSED_STEPS
from model.graph_io import StepInputs, StepOutputs
from model.ops import Ops
from model.qwen3 import Qwen3
from model.sampling import Draw, Draws, Sampling, allowed_ids

# a matrix product of one row may be summed in another order than one of several rows
MIN_TARGET_ROWS = 2


class Window(NamedTuple):
    """The rows of a step: the input id at its position and k drafts after it, over the keys of the bucket.

    What a platform asks for is dealt with here: the target's pass has at least MIN_TARGET_ROWS rows, those beyond
    the drafts are cut off again, and no draft is accepted that would go beyond the context's end.
    """

    k: int
    placement: Placement

    @classmethod
    def of(cls, k: int, position_B1: Tensor, bucket: int) -> Window:
        """The window of a step from these positions on, in a bucket of so many keys."""
        keys_S = _iota(bucket, position_B1)
        rows_N = _iota(max(k + 1, MIN_TARGET_ROWS), position_B1)
        return cls(k, Placement(position_B1 + rows_N, keys_S))

    def row(self, n: int, draw: Draw) -> tuple[Placement, Draw]:
        """Where row n of each sequence is, alone in a pass of the draft, and what it draws with."""
        positions_BN = self.placement.positions_BN
        return self.placement._replace(positions_BN=positions_BN[:, n : n + 1]), draw.row(n, positions_BN.shape[1])

    def padded(self, candidates_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(candidates_BN, (0, max(0, MIN_TARGET_ROWS - self.k - 1)))

    def cut(self, draws: Draws) -> Draws:
        """The draws after the N rows of the step."""
        return draws.each(lambda t: t[..., : self.k + 1])

    def mask(self, next_pos_B1: Tensor) -> Tensor:
        """(B, S) the attention mask of the next step."""
        return (self.placement.keys_S < next_pos_B1).to(torch.int32)

    def limit(self, k_limits_B: Tensor, length: int) -> Tensor:
        """(B,) drafts that may be accepted: the last position that a token may take is length - 1."""
        room_B = length - 2 - self.placement.positions_BN[:, 0]
        return torch.minimum(k_limits_B, room_B).clamp(min=0)


class Pair(nn.Module):
    """A target and its draft, built on the same operations; without a draft, the target alone."""

    def __init__(self, target: Qwen3, draft: Qwen3 | None, ops: Ops) -> None:
        super().__init__()
        self.target_model, self.draft_model, self.ops = target, draft, ops

    def forward(self, stage: Callable[..., StepOutputs], *args: Any) -> StepOutputs:
        """Run a stage, `Pair.step` or `Pair.prefill`.

        `torch.func.functional_call`, by which a graph's weights take the place of these parameters, calls `forward`
        and nothing else.
        """
        return stage(self, *args)

    def unfiltered_step(
        self, k: int, inputs: StepInputs, draft_caches: list[Cache], target_caches: list[Cache]
    ) -> StepOutputs:
        """`step` of sequences of which none filters: the host picks its graph, for no graph has a branch."""
        return self.step(k, inputs, draft_caches, target_caches, filters=False)

    def step(
        self,
        k: int,
        inputs: StepInputs,
        draft_caches: list[Cache],
        target_caches: list[Cache],
        filters: bool = True,
    ) -> StepOutputs:
        """One step of every sequence: k drafts, N = k + 1 verified rows, 1 .. N emitted ids.

        Draft and target draw with the same noise at the same position. A draft is accepted while the two draws are
        equal; what is emitted is the target's own draw. So the text is the target's, whatever the draft.
        """
        kernels, window = self.target_model.kernels, Window.of(k, inputs.position_ids, inputs.attention_mask.shape[1])
        asked = inputs.sampling if filters else inputs.sampling.unfiltered()
        of_target, of_draft = self._prepared(asked, window.placement.positions_BN + 1)
        of_target = self._allowing(of_target, inputs.allowed)
        candidates_BN, draft_caches = self._draft(window, inputs.input_ids, of_draft, draft_caches)
        draws, target_caches = self.ops.call(
            self.target_model, window.padded(candidates_BN), target_caches, window.placement, of_target
        )
        draws, limit_B = window.cut(draws), window.limit(inputs.k_limits, self.target_model.length(target_caches))
        accepted_BN, count_B1, next_ids = kernels.accept(self.ops, candidates_BN[:, 1:], draws, limit_B)
        next_pos = inputs.position_ids + count_B1
        scores = None if draws.scores is None else draws.scores.permute(1, 2, 0)
        return StepOutputs(accepted_BN, next_ids, window.mask(next_pos), next_pos, draft_caches, target_caches, scores)

    def _allowing(self, draw: Draw, words_BW: Tensor | None) -> Draw:
        """The target's draw with what a mask allows, if there is one, the same for every row of a sequence."""
        if words_BW is None:
            return draw
        (start, count), rows = self.target_model.shard, len(draw.position_R) // len(words_BW)
        allowed_BV = allowed_ids(words_BW, None if count == self.target_model.config.vocab_size else start, count)
        return draw._replace(allowed_RV=allowed_BV.repeat_interleave(rows, 0))

    def _draft(
        self, window: Window, input_ids_B1: Tensor, draw: Draw, caches: list[Cache]
    ) -> tuple[Tensor, list[Cache]]:
        """The input id and k drafts, from k chained passes; one more pass completes the cache."""
        candidates = [input_ids_B1]
        if window.k == 0 or self.draft_model is None:
            return input_ids_B1, caches
        # a draft of other groups: its own operations, so that no trace of the target's is called for it
        ops = self.draft_model.parallel.ops
        for n in range(window.k):
            draws, caches = ops.call(self.draft_model, candidates[-1], caches, *window.row(n, draw))
            candidates.append(draws.merged())
        last, _ = window.row(window.k, draw)
        _, caches = self.draft_model.hidden(candidates[-1], caches, last)
        return torch.cat(candidates, 1), caches

    def _prepared(self, asked: Sampling, positions_BN: Tensor) -> tuple[Draw, Draw]:
        """What the target and the draft draw with at a step's positions: the same noise where their shards are the
        same; the draft guesses what its filters keep, for its draws have no say in what is emitted."""
        target, draft = self.target_model, self.draft_model
        prepared = of_draft = target.kernels.prepare(self.ops, asked, positions_BN, target.shard)
        if draft is not None and draft.shard.width != target.shard.width:
            of_draft = draft.kernels.prepare(self.ops, asked, positions_BN, draft.shard)
        return prepared, of_draft._replace(guess_J=torch.tensor(GUESSED_STEPS, device=positions_BN.device))

    def prefill(self, k: int, inputs: StepInputs, draft_caches: list[Cache], target_caches: list[Cache]) -> StepOutputs:
        """A prompt of one sequence into its slot of both caches, and its first token."""
        length_B = inputs.attention_mask.sum(-1).to(torch.int32)
        keys_S = _iota(inputs.attention_mask.shape[1], length_B)
        placement = Placement(keys_S[None], keys_S, inputs.seq_ids)
        x_BSE, target_caches = self.target_model.hidden(inputs.input_ids, target_caches, placement)
        last_BE = x_BSE[_iota(1, length_B), length_B - 1]
        logits_BV = self.target_model.logits(last_BE)
        kernels = self.target_model.kernels
        # the first token's position is the prompt's length
        draw = kernels.prepare(self.ops, inputs.sampling, length_B[:, None], self.target_model.shard)
        draws = kernels.coupled_sample(self.ops, logits_BV, self._allowing(draw, inputs.allowed))
        token_B1 = draws.merged()[:, None]
        if self.draft_model is not None:
            _, draft_caches = self.draft_model.hidden(inputs.input_ids, draft_caches, placement)
        accepted_BN = torch.where(_iota(k + 1, length_B) == 0, token_B1, -1)
        next_pos = length_B[:, None]
        next_mask = (_iota(self.target_model.length(target_caches), length_B) < next_pos).to(torch.int32)
        scores = None if draws.scores is None else draws.scores.T[:, None].repeat(1, k + 1, 1)
        return StepOutputs(accepted_BN, token_B1, next_mask, next_pos, draft_caches, target_caches, scores)


def _iota(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)
