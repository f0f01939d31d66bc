"""Shards of a build, cut for all ranks in one pass over the checkpoints.

Each tensor is read once, from its beginning to its end; threads hash and write the ranks' parts of it, tensor after
tensor. Now and then the length and the sha256 of each unfinished file so far are recorded: a build that was killed goes
on from there, with the files whose beginning still matches the record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch

from compile.bundle.lanes import THREADS, Lanes
from compile.bundle.shard_writer import ShardWriter
from compile.bundle.sources import digests
from compile.bundle.staging import StagedFile, record, recorded
from compile.recipes import shard_recipe
from model.cut import Weight
from model.dtypes import BY_FLAG, BY_NAME
from model.weights import RANK, shard_file
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.manifest import File
from trnspec.bundle.part import Part
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.shards import shard_header, shard_specs

# written between two records: the most work that a kill can cost
PART_BYTES = 512 << 20


class Cutter:
    """Makes all shards that are due when the first of them is requested."""

    def __init__(self, plan: BundlePlan, folders: Mapping[str, Path], memory: Path) -> None:
        """`folders` of the checkpoints by the role of their model; `memory` is the file with their digests."""
        self.plan, self.spec, self.parts = plan, plan.spec, plan.spec.parts
        self._checkpoints: dict[str, Checkpoint] = {}
        for part in self.parts:
            self._checkpoints[part.role] = Checkpoint(folders[part.role], part.config, self._checkpoints.get("target"))
        sources = {role: digests(checkpoint.files, memory) for role, checkpoint in self._checkpoints.items()}
        headers = {rank: sha256(shard_header(plan, rank)).hexdigest() for rank in range(self.spec.tp)}
        self._recipes = {rank: shard_recipe(sources, header) for rank, header in headers.items()}
        self._due = list(self._recipes)
        self._digests: dict[int, str] = {}

    def files(self) -> list[StagedFile]:
        """A file for each rank."""
        return [
            StagedFile(shard_file(rank), recipe, functools.partial(self.write, rank))
            for rank, recipe in self._recipes.items()
        ]

    def due(self, names: Iterable[str], folder: Path) -> int:
        """Only these files of a bundle's folder have to be made; returns the bytes of it that an earlier run made."""
        wanted = set(names)
        self._due = [rank for rank in self._recipes if shard_file(rank) in wanted]
        unfinished = [folder / _unfinished(rank) for rank in self._due]
        return sum(file.stat().st_size for file in unfinished if file.exists())

    def write(self, rank: int, path: Path) -> str:
        """Put a rank's shard at a path in the weights of a bundle's folder; returns its sha256."""
        if rank not in self._digests:
            self._digests = self._pass(path.parents[1])
        (path.parents[1] / _unfinished(rank)).replace(path)
        return self._digests[rank]

    def _pass(self, folder: Path) -> dict[int, str]:
        specs = shard_specs(self.plan)

        def opened(rank: int) -> ShardWriter:
            begun = recorded(folder, _unfinished(rank))
            known = begun if begun and begun.recipe == self._recipes[rank] else None
            return ShardWriter(folder / _unfinished(rank), specs, shard_header(self.plan, rank), known)

        with ThreadPoolExecutor(THREADS) as readers:
            writers = dict(zip(self._due, readers.map(opened, self._due), strict=True))
        threads = torch.get_num_threads()
        # the lanes keep the cores busy: a copy by many threads would wait for its last one
        torch.set_num_threads(1)
        try:
            with Lanes() as lanes:
                self._write_all(writers, lanes, folder)
            return {rank: writer.finish() for rank, writer in writers.items()}
        finally:
            torch.set_num_threads(threads)
            for writer in writers.values():
                writer.close()

    def _write_all(self, writers: dict[int, ShardWriter], lanes: Lanes, folder: Path) -> None:
        names, since = self.spec.weight_names(), 0
        for part in self.parts:
            name = names[f"{part.prefix}.{RANK}"]
            for rank, writer in writers.items():
                if name not in writer.kept:
                    writer.write(name, torch.tensor([rank % part.head_ranks], dtype=torch.int32))
        weights = [(part, w) for part in self.parts for w in part.weights]
        # whole numbers come first in a file
        for part, weight in sorted(weights, key=lambda w: w[1].dtype != "int32"):
            name = names[f"{part.prefix}.{weight.ours}"]
            if missing := {rank: writer for rank, writer in writers.items() if name not in writer.kept}:
                since += self._write(part, weight, name, missing, lanes)
            if since >= PART_BYTES:
                lanes.drain()
                self._note(folder, writers)
                since = 0
        lanes.drain()
        self._note(folder, writers)

    def _write(self, part: Part, weight: Weight, name: str, writers: dict[int, ShardWriter], lanes: Lanes) -> int:
        """Have one weight written to these files; returns its bytes."""
        # each group of ranks holds a copy of the draft
        holders: dict[int, list[int]] = {}
        ranks = part.head_ranks if weight.of_head else part.ranks
        for rank in writers:
            holders.setdefault(rank % ranks, []).append(rank)
        dtype, count = (BY_NAME[weight.dtype] if weight.dtype else BY_FLAG[self.spec.dtype]).torch, 0
        for piece in self._checkpoints[part.role].pieces(weight, sorted(holders), ranks, dtype):
            for rank in holders[piece.rank]:
                lanes.give(rank, piece.rows.nbytes, functools.partial(writers[rank].write, name, piece.rows))
                count += piece.rows.nbytes
        return count

    def _note(self, folder: Path, writers: dict[int, ShardWriter]) -> None:
        for rank, writer in writers.items():
            record(folder, _unfinished(rank), File(self._recipes[rank], writer.written(), writer.bytes))


def _unfinished(rank: int) -> str:
    return f"{shard_file(rank)}.cut"
