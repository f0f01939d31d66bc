"""Interval bookkeeping against a naive reading: compare every pair of accesses, byte by byte."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nkisim.event import Event, Extent
from nkisim.timeline.dependence import RESULT, Dependence, Operand, may_overlap, shape_of

Access = tuple[bool, int, int, int]


def extent(start: int, size: int, half: int) -> Extent:
    partitions = ((0, 64), (64, 128), (0, 128))[half]
    count = size * (partitions[1] - partitions[0])
    return Extent("sbuf", 1, "t", 0, partitions, (start, start + size), count, "uint8", size)


def event(index: int, access: Access) -> Event:
    write, start, size, half = access
    tile = (extent(start, size, half),)
    reads, writes = ((), tile) if write else (tile, ())
    return Event(index, 0, "vector", "op", reads, writes, {}, ("k", 1), None)


def conflicts(a: Access, b: Access) -> bool:
    apart = a[1] + a[2] <= b[1] or b[1] + b[2] <= a[1]
    return (a[0] or b[0]) and not apart and not (a[3] != b[3] and 2 not in (a[3], b[3]))


def closure(edges: list[set[int]]) -> list[set[int]]:
    """Everything that an event waits for, directly or not."""
    reach: list[set[int]] = []
    for direct in edges:
        reach.append(direct.union(*(reach[other] for other in direct)))
    return reach


ACCESS = st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 8), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(st.lists(ACCESS, max_size=14), st.booleans())
def test_same_order_as_comparing_every_pair(accesses: list[Access], shared: bool) -> None:
    """Also where an access that comes again is looked up once."""
    dependence, known = Dependence(), dict[Access, list[Operand]]()
    edges: list[set[int]] = []
    for i, access in enumerate(accesses):
        # a lane of its own per event, so that every reader is remembered
        first, rest = dependence.edges(i, i, event(i, access), known.setdefault(access, []) if shared else [])
        edges.append(set(first) | set(rest))
    naive = [{j for j in range(i) if conflicts(accesses[j], a)} for i, a in enumerate(accesses)]
    assert closure(edges) == closure(naive)


def test_kinds_of_edges() -> None:
    dependence = Dependence()
    dependence.edges(0, 0, event(0, (True, 0, 8, 2)), [])
    assert dependence.edges(1, 1, event(1, (False, 0, 8, 2)), [])[1] == {0: RESULT}
    assert set(dependence.edges(2, 2, event(2, (True, 0, 8, 2)), [])[1]) == {0, 1}


def test_the_weights_of_a_product_are_apart() -> None:
    dependence = Dependence()
    dependence.edges(0, 0, event(0, (True, 0, 8, 2)), [])
    product = replace(event(1, (False, 0, 8, 2)), engine="tensor")
    assert dependence.edges(1, 1, product, []) == ({0: RESULT}, {})


def strided(column: int, width: int) -> Extent:
    span = (column, column + 9 * 100 + width)
    return Extent("hbm", 1, "t", -1, (0, 1), span, 10 * width, "uint8", width)


def test_columns_overlap_only_if_their_bytes_do() -> None:
    left, right, across = strided(0, 50), strided(50, 50), strided(40, 20)
    assert shape_of(left)[2:] == (100, 0, 50)
    assert not may_overlap(shape_of(left), shape_of(right))
    assert may_overlap(shape_of(left), shape_of(across))
    assert may_overlap(shape_of(right), shape_of(across))
    dense = Extent("hbm", 1, "t", -1, (0, 1), (0, 1000), 1000, "uint8", 1000)
    assert shape_of(dense) == (0, 1, 0, 0, 0)
    assert may_overlap(shape_of(dense), shape_of(right))
