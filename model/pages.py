"""Blocks side by side for a step's passes of the draft: they share one copy of the bucket's keys and values.

A pass gathers the blocks that it attends; k passes over the same blocks gather them once. The passes write to the copy,
and the rows that they may have written go back into the pool, with the same bits where they have not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from model import attention
from model.cache import Cache
from model.drafters import DraftState
from model.ops import iota
from model.sampling import Draw
from model.window import Window

if TYPE_CHECKING:
    from model.speculative import Pair


def drafted(pair: Pair, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
    """The drafter's proposal and its state, as `Drafter.propose`."""
    placement, pools = window.placement, state.caches
    if placement.table_BL is None or not pools or not window.k or not pair.target_model.kernels.copies_blocks:
        return pair.drafter.propose(window, ids_BT, draw, state)
    table_BL = placement.table_BL
    copies = [Cache(*(attention.in_order(t, table_BL) for t in pool)) for pool in pools]
    beside = window._replace(placement=placement._replace(table_BL=None))
    candidates_BN, after = pair.drafter.propose(beside, ids_BT, draw, state._replace(caches=copies))
    # a pass begins as many rows before the input id as a drafter keeps ids or states
    before = state.kept[0].shape[1] if state.kept else 0
    rows_BN = placement.positions_BN[:, :1] - before + iota(before + window.k, placement.positions_BN)
    written = [Cache(*(_rows(t, rows_BN) for t in copy)) for copy in after.caches]
    pools = [attention.append(pair.ops, w, pool, placement, rows_BN) for w, pool in zip(written, pools, strict=True)]
    return candidates_BN, after._replace(caches=pools)


def _rows(copy_BGSD: Tensor, positions_BN: Tensor) -> Tensor:
    """(B, G, N, D) the rows at these positions; any of those outside."""
    places_BN = positions_BN.clamp(0, copy_BGSD.shape[2] - 1)
    return copy_BGSD.transpose(1, 2)[iota(len(places_BN), places_BN)[:, None], places_BN].transpose(1, 2)
