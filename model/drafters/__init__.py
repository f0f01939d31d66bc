"""The protocol of drafters: the proposer of a step's k drafts, and its state for the next step.

    candidates_BN, state = drafter.propose(window, input_ids, draw, state)
    draws, taps          = target(candidates_BN)                       # N = k + 1 rows in one pass
    kept                 = accept(candidates_BN, draws)                # 1 .. N ids: the target's own draws
    state                = drafter.keep(Verified(candidates_BN, kept, taps), state)

Every emitted id is the target's own draw, so a drafter's proposals never change the output, only how many of them are
accepted. It draws with the noise of the positions it proposes for, so that drafts are accepted at temperatures above 0
too. A drafter is

  kind     | proposes by                                    | its model | reads of the target | remembers
  ---------|------------------------------------------------|-----------|---------------------|---------------
  (host)   | the host's drafts, or none                     | none      | nothing             | nothing
  chain    | k passes, the first of 2 rows, the others of 1 | a Qwen3   | nothing             | caches, an id
  parallel | 1 pass of 2k rows, k - 1 of them masks         | a Qwen3   | nothing             | caches, ids
  dflash   | 1 pass of k or k + 1 rows, masks but the first | layers    | states of layers    | caches
  eagle3   | 1 pass of k + 1 rows, k - 1 of 1 row           | one layer | states of layers    | a cache, a state

- its model: an nn.Module, `draft_model` in a pair;
- its `taps`: indexes of the target's hidden states that it reads, as transformers counts them, joined in `features`;
- its state, `DraftState`: caches as a decoder's, and `kept` tensors (B, K, F), slot b's in row b. It crosses a graph's
  border like the target's caches, aliased, in the order of its `Kind`: a host loop never sees it;
- a step's rows end at the input id's position p. `keep` moves the state on by the count of kept ids, so
  that `propose` finds the same shape at every step, and no offset in a graph depends on how many were kept;
- its `Kind`: the facts that a build, a plan and a tuner need. A new drafter is one file and a line in registry.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.cache import AttentionMetadata, Cache
from model.ops import Ops, iota, rows_of
from model.parallel import Shard
from model.rank_model import RankModel
from model.rough_filters import roughly
from model.sampling import Draw, Sampling
from model.window import Window


class DraftState(NamedTuple):
    """A drafter's state between steps: its model's caches, and tensors (B, K, F) whose row b is slot b's."""

    caches: list[Cache]
    kept: tuple[Tensor, ...] = ()


class Prompt(NamedTuple):
    """Rows of one sequence's prompt: the ids, their places and number, the id after them, features, and its slot."""

    ids_1S: Tensor
    meta: AttentionMetadata
    length_1: Tensor
    token_11: Tensor
    features_1SF: Tensor | None
    slot_1: Tensor


class Verified(NamedTuple):
    """A step's candidates, of which the first `count` were kept, at the window's rows; the id drawn after the last kept
    one, which is the next step's input; and the target's states of the candidates' rows, if the drafter taps any."""

    window: Window
    candidates_BN: Tensor
    count_B1: Tensor
    next_B1: Tensor
    features_BNF: Tensor | None


class Drafter:
    """Proposes the host's drafts, which came with the input id; in a step of the target alone there are none."""

    # indexes of the target's hidden states that `keep` and `prompt` are given, as transformers counts them
    taps: tuple[int, ...] = ()
    model: RankModel | None = None

    def draw(self, ops: Ops, asked: Sampling, window: Window, of_target: Draw, shard: Shard) -> Draw:
        """The draw of the drafts: the target's noise, made for the draft's own ids where its shard differs."""
        own = shard if self.model is None else self.model.shard
        if self.model is not None and (own.ids_V is not None or own.width != shard.width):
            of_target = self.model.kernels.prepare(ops, asked, window.drawn_BN, own)
        return roughly(of_target)

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        """(B, N) the input ids at their positions and k drafts after them; T is 1, or N where the host drafts."""
        return ids_BT, state

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        """The state after a step."""
        return state

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        """The state with a prompt in its slot."""
        return state


def moved(kept_BKF: Tensor, new_BNF: Tensor, count_B1: Tensor) -> Tensor:
    """(B, K, F): the last K of the kept rows followed by the first `count` new ones."""
    return rows_of(torch.cat((kept_BKF, new_BNF), 1), count_B1 + iota(kept_BKF.shape[1], count_B1))


def in_slot(kept_BKF: Tensor, new_1KF: Tensor, slot_1: Tensor) -> Tensor:
    """The kept tensor with one slot's rows replaced."""
    here_B = iota(kept_BKF.shape[0], slot_1) == slot_1
    return torch.where(here_B[:, None, None], new_1KF, kept_BKF)
