"""Shards of a build, cut for several ranks in one pass over the checkpoints.

A pass per rank would read every tensor that is cut by columns once for each rank. A pass for all ranks would lose all
when it is killed. So a pass makes a few GB of shards, and a resumed build goes on with the ranks that have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compile.bundle.shard_writer import ShardWriter
from compile.bundle.staging import StagedFile
from compile.plan import BuildPlan
from compile.recipes import shard_recipe
from compile.spec import BuildSpec
from model.bundle.checkpoint import Checkpoint
from model.bundle.shards import cut_label
from model.bundle.weights import shard_file
from model.dtypes import BY_FLAG

# shards that one pass makes, and a kill can cost
PASS_BYTES = 4 << 30


def layout(spec: BuildSpec) -> dict[str, Any]:
    """How the weights are cut and laid out; every shard carries it."""
    return {
        "ranks": spec.tp,
        "dtype": spec.dtype,
        "fused_qkv": False,
        "transposed": False,
        "draft_ranks": spec.draft_ranks,
        "packed": {m.prefix: spec.packing(m)._asdict() for m in spec.models},
    }


class Cutter:
    """Makes the shards that are due when the first of a group is asked for."""

    def __init__(self, plan: BuildPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self._checkpoints = {m.prefix: Checkpoint(Path(m.checkpoint), m.config) for m in plan.spec.models}
        self._due = list(range(plan.spec.tp))
        self._cut: dict[int, Path] = {}

    def files(self) -> list[StagedFile]:
        """A file for each rank."""
        sources = {prefix: checkpoint.identity() for prefix, checkpoint in self._checkpoints.items()}
        return [self._file(rank, shard_recipe(sources, rank, layout(self.spec))) for rank in range(self.spec.tp)]

    def _file(self, rank: int, recipe: str) -> StagedFile:
        return StagedFile(shard_file(rank), recipe, lambda path: self.write(rank, path))

    def due(self, names: Iterable[str]) -> None:
        """Only these files have to be made."""
        wanted = set(names)
        self._due = [rank for rank in range(self.spec.tp) if shard_file(rank) in wanted]

    def write(self, rank: int, path: Path) -> None:
        """Put a rank's shard at a path."""
        if rank not in self._cut:
            at = self._due.index(rank)
            count = max(1, PASS_BYTES // max(1, self.plan.weight_bytes))
            self._pass(self._due[at : at + count], path.parent)
        self._cut.pop(rank).replace(path)

    def _pass(self, ranks: list[int], folder: Path) -> None:
        specs = self.plan.target_weights + self.plan.draft_weights
        paths = {rank: folder / f"{Path(shard_file(rank)).name}.cut" for rank in ranks}
        writers = {r: ShardWriter(path, specs, cut_label(layout(self.spec), r)) for r, path in paths.items()}
        try:
            self._write_all(writers)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        for writer in writers.values():
            writer.close()
        self._cut |= paths

    def _write_all(self, writers: dict[int, ShardWriter]) -> None:
        names, dtype = self.spec.weight_names(), BY_FLAG[self.spec.dtype].torch
        for model in self.spec.models:
            # groups of ranks hold a copy of the draft each
            holders: dict[int, list[ShardWriter]] = {}
            for rank, writer in writers.items():
                holders.setdefault(rank % model.ranks, []).append(writer)
            checkpoint = self._checkpoints[model.prefix]
            for piece in checkpoint.pieces(sorted(holders), model.ranks, dtype, self.spec.packing(model)):
                for writer in holders[piece.rank]:
                    writer.write(names[f"{model.prefix}.{piece.name}"], piece.row, piece.rows)
