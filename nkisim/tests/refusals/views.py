"""Refusals of views, subscripts and patterns, of tensors' creation, and of the language's functions."""

from __future__ import annotations

from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from harness import hbm, tile, words
from nkisim.errors import *
from registry import rules


def cube(inner: int = 4) -> Any:
    return tile(8, 4 * inner).reshape((8, 4, inner))


def register(value: int = 0) -> Any:
    return nisa.register_alloc(value)


def two_rows(**more: Any) -> Any:
    return hbm().ap([[8, 2], [1, 8]], vector_offset=words(0, 1), **more)


def read(view: Any) -> Any:
    """Use a run-time index, which is checked when an instruction uses it."""
    got = nl.ndarray(view.shape, dtype=view.dtype)
    return nisa.dma_copy(dst=got, src=view)


rules(
    "views",
    (IllegalView, lambda b: tile()[0 : 64 : (2 if b else 1)]),
    (IllegalView, lambda b: cube()[(..., ..., 0) if b else (..., 0)]),
    (IllegalView, lambda b: tile()[(0, 0, 0) if b else (0, 0)]),
    (IllegalView, lambda b: tile()[:, 4 : (4 if b else 5)]),
    (IllegalView, lambda b: tile()[:, "0" if b else 0]),
    (IllegalView, lambda b: hbm()[register(), register() if b else 0]),
    (IllegalView, lambda b: tile()[register() if b else 0]),
    (OutOfRange, lambda b: tile()[:, nl.ds(register(), 9 if b else 8)]),
    (IllegalView, lambda b: nisa.tensor_copy(tile(4), (hbm(8).vector_select(0, words(1, 2, 3, 4)) if b else tile(4)))),
    (WrongDtype, lambda b: read(hbm()[:, nl.ds(tile(1, 1, "float32" if b else "int32", 0), 1)])),
    (ShapeMismatch, lambda b: read(hbm().ap([[8, 3 if b else 2], [1, 8]], vector_offset=words(0, 1)))),
    (UnwrittenRead, lambda b: half_written(1 if b else 0)),
    (IllegalView, lambda b: tile().ap([[8, 128], [1, 4]], scalar_offset=register(), indirect_dim=0 if b else 1)),
    (OutOfRange, lambda b: tile().ap([[8, 128], [1, 0 if b else 1]])),
    (IllegalView, lambda b: tile().ap([[16 if b else 8, 64], [1, 8]])),
    (IllegalView, lambda b: tile().reshape((64, 16) if b else (128, 2, 4))),
    (DynamicOutOfRange, lambda b: nisa.tensor_copy(tile(columns=1), tile()[:, nl.ds(register(8 if b else 7), 1)])),
    (OutOfRange, lambda b: hbm().ap([[8, 128], [1, 9 if b else 8]])),
    (IllegalView, lambda b: tile()[:, 0 : 8 : (2 if b else 1)].view(nl.int16)),
    (IllegalView, lambda b: tile(8, 3 if b else 4, "int8").view(nl.int16)),
    (IllegalView, lambda b: cube().rearrange(("p", "a") if b else ("p", "a", "b"), ("p", "b", "a"))),
    (IllegalView, lambda b: cube().rearrange(("p", "a", "b"), ("p", "a", "c" if b else "b"))),
    (IllegalView, lambda b: moving().squeeze_dim(1) if b else moving().expand_dim(2)),
    (IllegalView, lambda b: moving().permute((0, 2, 1)) if b else cube().permute((0, 2, 1))),
    (OutOfRange, lambda b: tile().slice(1, 0, 9 if b else 8)),
    (IllegalView, lambda b: (tile() if b else hbm()).vector_select(0, words(1))),
    (IllegalView, lambda b: two_rows(scalar_offset=register() if b else None)),
    (IllegalView, lambda b: two_rows(indirect_dim=1 if b else 0)),
    (NotSimulated, lambda b: tile().indirect(0) if b else tile().select(1, 0)),
    (OutOfRange, lambda b: tile().select(2 if b else 1, 0)),
    (IllegalView, lambda b: tile().flatten_dims(0 if b else 1, 1)),
    (IllegalView, lambda b: cube().permute((0, 1, 1) if b else (0, 2, 1))),
    (IllegalView, lambda b: cube().permute((1, 0, 2) if b else (0, 2, 1))),
    (IllegalView, lambda b: tile(columns=2 if b else 1).broadcast(1, 4)),
    (OutOfRange, lambda b: tile().expand_dim(4 if b else 2)),
    (IllegalView, lambda b: tile(columns=2 if b else 1).squeeze_dim(1)),
    (IllegalView, lambda b: tile().reshape((128, 3 if b else 4, 2))),
    (IllegalView, lambda b: (cube()[:, :, 0:2] if b else cube()).flatten_dims(1, 2)),
    (IllegalView, lambda b: (cube()[:, :, 0:2] if b else cube(2)).reshape((8, 8))),
)


def moving() -> Any:
    """Return a view of (8, 1, 4) that starts at a run-time place of dimension 1."""
    return cube()[:, nl.ds(register(), 1)]


def half_written(row: int) -> Any:
    made = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.hbm)
    nisa.dma_copy(dst=made[0:1], src=tile(1))
    return read(made.vector_select(0, words(row)))


rules(
    "creation",
    (WrongDtype, lambda b: nl.ndarray((8, 8), "float64" if b else "float32")),
    (IllegalView, lambda b: nl.ndarray((8,) if b else (8, 1), nl.float32)),
    (Misaligned, lambda b: nl.ndarray((8, 8), nl.float32, address=(0,) if b else (0, 0))),
    (WrongArgument, lambda b: nl.ndarray((8, 8), nl.float32, buffer="sbuf" if b else nl.sbuf)),
)
rules(
    "language",
    (WrongOperator, lambda b: nl.bypass() if b else nl.abs(tile())),
    (WrongArgument, lambda b: nl.add(1.0, 2.0 if b else tile())),
    (ShapeMismatch, lambda b: nl.add(tile(), tile(columns=1 if b else 8))),
    (WrongArgument, lambda b: nl.exp(1.0 if b else tile())),
    (WrongArgument, lambda b: nl.var(cube(), axis=2 if b else (1, 2))),
    (LoopMisuse, lambda b: nl.fori_loop(0, 2, lambda i: None, step=0 if b else 1)),
    (LoopMisuse, lambda b: nl.fori_loop(0, 2, lambda i: 1 if b else None)),
    (LoopMisuse, lambda b: nl.while_loop(1 if b else register(0), lambda r: r)),
    (LoopMisuse, lambda b: crossing(inside=b)),
    (WrongArgument, lambda b: nl.program_id(1 if b else 0)),
    (WrongArgument, lambda b: nl.num_programs(1 if b else 0)),
    (WrongSpace, lambda b: nl.load(tile() if b else hbm())),
    (ShapeMismatch, lambda b: nl.load(hbm().reshape((1024,)) if b else hbm())),
    (WrongSpace, lambda b: nl.store(tile() if b else hbm(), tile())),
    (ShapeMismatch, lambda b: nl.load_transpose2d(hbm().reshape((128, 2, 4)) if b else hbm())),
    (ShapeMismatch, lambda b: nl.transpose(cube() if b else tile())),
    (NotSimulated, lambda b: nl.matmul(tile(), tile(), transpose_x=not b)),
    (ShapeMismatch, lambda b: nl.broadcast_to(tile(columns=1), (128, 4, 1) if b else (128, 4))),
    (ShapeMismatch, lambda b: nl.broadcast_to(tile(columns=2 if b else 1), (128, 4))),
    (ShapeMismatch, lambda b: nl.where(tile(), tile(columns=9 if b else 8), 0.0)),
    (NotSimulated, lambda b: nl.gather_flattened(tile(), tile(dtype="uint32"), axis=1 if b else 0)),
    (WrongArgument, lambda b: nl.softmax(cube(), axis=2 if b else (1, 2))),
    (ShapeMismatch, lambda b: nl.rms_norm(tile(), tile(columns=1 if b else 8), 1, 8)),
)


def crossing(inside: bool) -> Any:
    before = nisa.memset(dst=tile(), value=0.0)

    def body(_: Any) -> None:
        after = nisa.memset(dst=tile(), value=0.0)
        if inside:
            after.depends_on(before)

    nl.fori_loop(0, 1, body)
