"""Sketches of published attention of several heads and of attention whose scores go through HBM.

On one core, written from the descriptions in their records; no code of their code.
"""

from __future__ import annotations

from dataclasses import dataclass

from nkisim.event import Event
from validation.products import (
    BANK,
    FP32,
    Limbs,
    P,
    accumulate,
    copy,
    identity_matrix,
    load,
    transposed,
    transposed_together,
)
from validation.sketch import Array, Sketch, Tile, View, static_sketch


@dataclass(frozen=True)
class Variant:
    """The differences of a version of the grouped attention from the first one."""

    # query tiles whose powers are transposed before they multiply the values; 0: each part right after its transpose
    block: int = 0
    # scaling of the scores by an instruction of its own, division of the powers instead of the sums
    scaled: bool = True
    divided: bool = True
    # bf16 parts of the scores' operands, and of the operands that weigh values
    split: bool = False
    split_values: bool = False
    # the greatest score is subtracted; powers are taken from PSUM
    peak: bool = True
    direct: bool = False


class GroupedAttention:
    """16 query heads, 8 heads of keys and values, 4096 positions of 128, fp32: scores and softmax stay on chip."""

    length = 4096

    def __init__(self, variant: Variant) -> None:
        self.s, self.variant = static_sketch(), variant
        self.identity = identity_matrix(self.s)
        # positions on partitions; a tile of 128 positions of one head is a block of 128 columns
        self.q, self.k, self.v, self.out = (
            self.s.array(P, heads * self.length, FP32) for heads in (16, 8, 8, 16)
        )  # fmt: skip

    def events(self) -> list[Event]:
        """Two query heads for each head of keys."""
        for head in range(8):
            keys, values = self._keys(head), self._values(head)
            for query_head in (2 * head, 2 * head + 1):
                for first in range(0, self.length // P, max(1, self.variant.block)):
                    self._block(query_head, first, keys, values)
        return self.s.events()

    def _tile(self, array: Array, head: int, at: int) -> Tile:
        start = head * self.length + at * P
        return load(self.s, array, (0, P), (start, start + P))

    def _keys(self, head: int) -> Limbs:
        full = self.s.tile(self.length, FP32)
        for at in range(0, self.length, BANK):
            parts = [self._tile(self.k, head, (at + i) // P).all() for i in range(0, BANK, P)]
            copy(self.s, full.part(at, at + BANK), transposed_together(self.s, parts, self.identity))
        return self._limbs(full, self.variant.split)

    def _values(self, head: int) -> Limbs:
        full = self.s.tile(self.length, FP32)
        for at in range(self.length // P):
            start = head * self.length + at * P
            self.s.dma_copy(full.part(at * P, at * P + P), self.v.block((0, P), (start, start + P)))
        return self._limbs(full, self.variant.split_values)

    def _limbs(self, full: Tile, split: bool) -> Limbs:
        limbs = Limbs(self.s, full.columns, split, full)
        if split:
            limbs.take(0, full.all())
        return limbs

    def _block(self, head: int, first: int, keys: Limbs, values: Limbs) -> None:
        s, count = self.s, max(1, self.variant.block)
        transposed_tile = [Limbs(s, self.length, self.variant.split_values) for _ in range(count)]
        sums, inverses = [], []
        for i, powers_transposed in enumerate(transposed_tile):
            powers, inverse = self._powers(head, first + i, keys)
            inverses.append(inverse)
            bank = s.tile(P, FP32, "psum") if self.variant.block == 0 else None
            width = P if bank is not None else BANK
            for at in range(0, self.length, width):
                parts = [powers.part(i, i + P) for i in range(at, at + width, P)]
                powers_transposed.take(at, transposed_together(s, parts, self.identity))
                if bank is not None:
                    s.nc_matmul(bank.all(), powers_transposed.parts(at, at + P)[0], values.parts(at, at + P)[0], at > 0)
            sums.append(bank)
        for i, (powers_transposed, bank) in enumerate(zip(transposed_tile, sums, strict=True)):
            bank = bank or self._weighed(powers_transposed, values)
            self._store(head, first + i, bank.all(), inverses[i])

    def _weighed(self, powers: Limbs, values: Limbs) -> Tile:
        bank = self.s.tile(P, FP32, "psum")
        spans = ((at, at + P) for at in range(0, self.length, P))
        accumulate(self.s, bank.all(), ((powers.parts(*span), values.parts(*span)) for span in spans))
        return bank

    def _powers(self, head: int, at: int, keys: Limbs) -> tuple[Tile, View]:
        """Powers of one query tile, divided or not, and the inverse of their sum."""
        s, variant, length = self.s, self.variant, self.length
        query_tile = s.tile(P, FP32)
        transposed(s, query_tile.all(), self._tile(self.q, head, at).all(), self.identity)
        query = self._limbs(query_tile, variant.split)
        powers, score = s.tile(length, FP32), None if variant.direct else s.tile(length, FP32)
        for start in range(0, length, BANK):
            bank, span = s.tile(BANK, FP32, "psum"), (start, start + BANK)
            accumulate(s, bank.all(), [(query.parts(0, P), keys.parts(*span))])
            if score is None:
                s.activation("exp", powers.part(*span), bank.all())
            else:
                copy(s, score.part(*span), bank.all())
        if score is not None:
            self._exponentiate(powers, score)
        total, inverse = s.tile(1, FP32).all(), s.tile(1, FP32).all()
        s.compute("vector", "tensor_reduce", total, powers.all(), elements=length)
        s.compute("vector", "reciprocal", inverse, total)
        if variant.divided:
            divided = s.tile(length, FP32)
            s.compute("vector", "tensor_scalar", divided.all(), powers.all(), inverse, scalar_operands=1)
            return divided, inverse
        return powers, inverse

    def _exponentiate(self, powers: Tile, score: Tile) -> None:
        s, limit = self.s, self.s.tile(1, FP32).all()
        if self.variant.scaled:
            s.compute("vector", "tensor_scalar", score.all(), score.all())
        if not self.variant.peak:
            s.activation("exp", powers.all(), score.all())
            return
        s.compute("vector", "tensor_reduce", limit, score.all(), elements=score.columns)
        if not self.variant.scaled:
            s.compute("vector", "tensor_scalar", limit, limit)
        s.activation("exp", powers.all(), score.all(), limit)

    def _store(self, head: int, at: int, sums: View, inverse: View) -> None:
        s, result = self.s, self.s.tile(P, FP32).all()
        if self.variant.divided:
            copy(s, result, sums)
        else:
            s.compute("vector", "tensor_scalar", result, sums, inverse, scalar_operands=1)
        start = head * self.length + at * P
        s.dma_copy(self.out.block((0, P), (start, start + P)), result)


def grouped_attention(variant: Variant) -> list[Event]:
    """One version of the grouped attention."""
    return GroupedAttention(variant).events()


def stored_attention(length: int, dtype: str) -> list[Event]:
    """Attention of one head of 128 in three passes: scores are stored, loaded, divided, stored and loaded again."""
    s = Sketch()
    q, k, v = (load(s, s.array(P, length, dtype), (0, P), (0, length), dtype) for _ in range(3))
    scores, out = s.array(length, length, FP32), s.array(length, P, dtype)
    rows = [(row, row + P) for row in range(0, length, P)]
    spans = [(at, at + BANK) for at in range(0, length, BANK)]
    for row in rows:
        score = s.tile(length, FP32)
        for span in spans:
            bank = s.tile(BANK, FP32, "psum")
            s.nc_matmul(bank.all(), q.part(*row), k.part(*span), False)
            copy(s, score.part(*span), bank.all())
        s.dma_copy(scores.block(row, (0, length)), score.all())
    for row in rows:
        score = load(s, scores, row, (0, length))
        s.dma_copy(scores.block(row, (0, length)), _softmax(s, score, spans).all())
    identity, values = identity_matrix(s), s.tile(length, FP32)
    for row in rows:
        transposed(s, values.part(*row), v.part(*row), identity)
    for row in rows:
        weights, transposed_tile, bank = (
            load(s, scores, row, (0, length)),
            s.tile(length, FP32),
            s.tile(P, FP32, "psum"),
        )
        for part in rows:
            transposed(s, transposed_tile.part(*part), weights.part(*part), identity)
        for i, part in enumerate(rows):
            s.nc_matmul(bank.all(), transposed_tile.part(*part), values.part(*part), i > 0)
        result = s.tile(P, dtype).all()
        copy(s, result, bank.all())
        s.dma_copy(out.block(row, (0, P)), result)
    return s.events()


def _softmax(s: Sketch, score: Tile, spans: list[tuple[int, int]]) -> Tile:
    """By parts of 512 columns."""
    powers, divided = s.tile(score.columns, FP32), s.tile(score.columns, FP32)
    peaks, totals = s.tile(len(spans), FP32), s.tile(len(spans), FP32)
    limit, total, inverse = (s.tile(1, FP32).all() for _ in range(3))
    for i, span in enumerate(spans):
        s.compute("vector", "tensor_reduce", peaks.part(i, i + 1), score.part(*span), elements=BANK)
    s.compute("vector", "tensor_reduce", limit, peaks.all(), elements=len(spans))
    for i, span in enumerate(spans):
        s.activation("exp", powers.part(*span), score.part(*span), limit)
        s.compute("vector", "tensor_reduce", totals.part(i, i + 1), powers.part(*span), elements=BANK)
    s.compute("vector", "tensor_reduce", total, totals.all(), elements=len(spans))
    s.compute("vector", "reciprocal", inverse, total)
    for span in spans:
        s.compute("vector", "tensor_scalar", divided.part(*span), powers.part(*span), inverse, scalar_operands=1)
    return divided
