"""A tree of candidates as a value: which row hangs from which, and its paths from the input id to a leaf; no torch.

Row 0 is the input id. A tree is written as the parents of the rows behind it, as `0,0,1,1`: rows 1 and 2 hang from the
input id, rows 3 and 4 from row 1. A row's depth is its distance from row 0, its rank the number of earlier rows that
have its parent: it holds the drafter's id of that rank for the position of that depth. A chain is 0,1, ... k - 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# as many rows as the kernels take
MAX_ROWS = 32
# the paths' rows are a constant of the graph, which folds no more than 1 KiB
MAX_PATH_ROWS = 256


@dataclass(frozen=True)
class Tree:
    """The parents of rows 1 .. N - 1, each smaller than its child."""

    parents: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.parents))

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies in a step."""
        return len(self.parents) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each row."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def k(self) -> int:
        """The most drafts that a step accepts."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each row among its siblings."""
        return (0, *(self.parents[:at].count(parent) for at, parent in enumerate(self.parents)))

    @property
    def width(self) -> int:
        """Candidates that a drafter gives for a position."""
        return max(self.ranks) + 1

    @property
    def leaves_only(self) -> bool:
        """Whether nothing hangs from a second best draft."""
        return not any(self.ranks[parent] for parent in self.parents)

    @cached_property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The rows from the input id to each leaf."""
        return tuple(self._from_root(row) for row in range(self.rows) if row not in self.parents)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The branches as k + 1 rows each, filled up by row 0, which nothing reads there."""
        return tuple(branch + (0,) * (self.k + 1 - len(branch)) for branch in self.branches)

    @property
    def places(self) -> tuple[int, ...]:
        """Where each row is in the rows of all paths; one that several share is in the first of them."""
        rows = [row for path in self.paths for row in path]
        return tuple(rows.index(row) for row in range(self.rows))

    def _from_root(self, row: int) -> tuple[int, ...]:
        return (*self._from_root(self.parents[row - 1]), row) if row else (0,)

    def cut(self, k: int) -> Tree:
        """The rows that are no deeper than k."""
        kept = [row for row in range(self.rows) if self.depths[row] <= k]
        return Tree(tuple(kept.index(self.parents[row - 1]) for row in kept[1:]))


def parse_tree(text: str) -> Tree:
    """The tree of a text; ValueError with one clause if it is none."""
    if not re.fullmatch(r"[0-9]{1,2}(,[0-9]{1,2})*", text):
        raise ValueError("it is no list of rows, as 0,0,1,1")
    tree = Tree(tuple(map(int, text.split(","))))
    late = next((row for row, parent in enumerate(tree.parents, 1) if parent >= row), 0)
    if late:
        raise ValueError(f"row {late} hangs from row {tree.parents[late - 1]}, which is not before it")
    if tree.rows > MAX_ROWS:
        raise ValueError(f"it has {tree.rows} rows with the input id's, a step takes {MAX_ROWS}")
    if len(tree.paths) * (tree.k + 1) > MAX_PATH_ROWS:
        raise ValueError(f"its {len(tree.paths)} paths of {tree.k + 1} rows have more than {MAX_PATH_ROWS} together")
    return tree
