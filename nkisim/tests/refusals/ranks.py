"""Refusals of collectives; each body runs on two ranks."""

from __future__ import annotations

from typing import Any

import nkisim.collectives as ncc
import nkisim.isa as nisa
import nkisim.language as nl
from harness import hbm, psum, tile, words
from nkisim.core.context import current
from nkisim.errors import *
from registry import rules

BOTH = ncc.ReplicaGroup([[0, 1]])


def reduce(src: Any = None, dst: Any = None, group: Any = BOTH, **more: Any) -> Any:
    src, dst = hbm(8) if src is None else src, hbm(8) if dst is None else dst
    return ncc.all_reduce([src], [dst], group, more.pop("op", nl.add), **more)


def permute(pairs: Any = ((0, 1), (1, 0)), place: Any = hbm) -> Any:
    return ncc.collective_permute([place(8)], [place(8)], pairs)


def ring(ids: Any = (0,)) -> Any:
    return ncc.collective_permute_implicit([[hbm(8)]], [[hbm(8)]], BOTH, channel_ids=ids)


def variable(counts: tuple[int, ...] = (4, 4), rows: int = 3, dtype: str = "uint32", room: int = 16) -> Any:
    """Send chunks of 16 elements' length to both ranks: counts, displacements, what is received."""
    metadata = hbm(rows, 2, dtype, 0)
    for rank, count in enumerate(counts):
        nisa.dma_copy(dst=metadata[0:1, rank : rank + 1], src=words(count, dtype=dtype))
    return ncc.all_to_all_v([hbm(1, 16)], [hbm(1, room)], BOTH, metadata)


def me() -> int:
    return current("rank").rank


rules(
    "ranks",
    (WrongArgument, lambda b: reduce(group=[[0, 1]] if b else BOTH)),
    (WrongArgument, lambda b: reduce(group=ncc.ReplicaGroup([[0, 1, 2]]) if b else BOTH)),
    (BadLaunch, lambda b: reduce(group=ncc.ReplicaGroup([[1 - me() if b else me()]]))),
    (NeedsNewerCore, lambda b: reduce(priority=1 if b else None)),
    (WrongArgument, lambda b: reduce(src=1.0 if b else hbm(8))),
    (WrongArgument, lambda b: reduce(src=psum(8) if b else hbm(8))),
    (WrongArgument, lambda b: reduce(src=tile(8) if b else hbm(8))),
    (WrongArgument, lambda b: ncc.all_reduce([hbm(8)], [hbm(8)] * (2 if b else 1), BOTH, nl.add)),
    (ShapeMismatch, lambda b: reduce(dst=hbm(8, 7 if b else 8))),
    (WrongArgument, lambda b: reduce(op=nl.multiply if b else nl.maximum)),
    (WrongArgument, lambda b: ncc.all_gather([hbm(8)], [hbm(16)], BOTH, 1 if b else 0)),
    (ShapeMismatch, lambda b: ncc.reduce_scatter([hbm(7 if b else 8)], [hbm(4)], BOTH, 0, nl.add)),
    (WrongArgument, lambda b: permute(place=tile if b else hbm)),
    (WrongArgument, lambda b: permute(((0, 1), (1, 1)) if b else ((0, 1), (1, 0)))),
    (WrongArgument, lambda b: ring((1,) if b else (0,))),
    (WrongArgument, lambda b: variable(dtype="int32" if b else "uint32")),
    (ShapeMismatch, lambda b: variable(rows=4 if b else 3)),
    (ShapeMismatch, lambda b: variable((9, 4) if b else (8, 4))),
    (ShapeMismatch, lambda b: variable((17, 0) if b else (16, 0), room=40)),
)
