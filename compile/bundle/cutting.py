"""Shards of a build, cut for all ranks in one pass over the checkpoints.

Each tensor is read once, from its beginning to its end; threads hash and write what the ranks take of it, tensor after
tensor. Now and then a note beside the unfinished files says how long each is and what its sha256 is by then: a build
that was killed goes on there, with the files whose beginning still is what the note says.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from compile.bundle.lanes import THREADS, Lanes
from compile.bundle.shard_writer import Part, ShardWriter
from compile.bundle.sources import digests
from compile.bundle.staging import StagedFile
from compile.plan import BuildPlan
from compile.recipes import shard_recipe
from compile.spec import BuildSpec, PartModel
from model.bundle.checkpoint import Checkpoint
from model.bundle.cut import Weight
from model.bundle.shards import cut_label
from model.bundle.weights import RANK, shard_file, table
from model.dtypes import BY_FLAG, BY_NAME

# written between two notes, and what a kill can cost
PART_BYTES = 512 << 20
_NOTE = "parts.json"


def layout(spec: BuildSpec) -> dict[str, Any]:
    """How the weights are cut and laid out; every shard carries it."""
    wider = {"draft_head_ranks": spec.draft_head_ranks} if spec.draft_head_ranks != spec.draft_ranks else {}
    return wider | {
        "ranks": spec.tp,
        "dtype": spec.dtype,
        "fused_qkv": False,
        "transposed": False,
        "draft_ranks": spec.draft_ranks,
        "packed": {m.prefix: spec.packing(m)._asdict() for m in spec.models},
    }


class Cutter:
    """Makes all shards that are due when the first of them is asked for."""

    def __init__(self, plan: BuildPlan, memory: Path) -> None:
        self.plan, self.spec = plan, plan.spec
        self._checkpoints: dict[str, Checkpoint] = {}
        for model in plan.spec.models:
            target = next(iter(self._checkpoints.values()), None)
            self._checkpoints[model.prefix] = Checkpoint(Path(model.checkpoint), model.config, target)
        sources = {prefix: digests(checkpoint.files, memory) for prefix, checkpoint in self._checkpoints.items()}
        self._recipes = {rank: shard_recipe(sources, rank, layout(self.spec)) for rank in range(self.spec.tp)}
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
        unfinished = [_unfinished(folder / shard_file(rank)) for rank in self._due]
        return sum(file.stat().st_size for file in unfinished if file.exists())

    def write(self, rank: int, path: Path) -> str:
        """Put a rank's shard at a path in its folder; returns its sha256."""
        if rank not in self._digests:
            self._digests = self._pass(path.parent)
        _unfinished(path.parent / Path(shard_file(rank)).name).replace(path)
        return self._digests[rank]

    def _pass(self, folder: Path) -> dict[int, str]:
        parts, specs = self._noted(folder), self.plan.target_weights + self.plan.draft_weights

        def begun(rank: int) -> ShardWriter:
            path = _unfinished(folder / Path(shard_file(rank)).name)
            return ShardWriter(path, specs, cut_label(layout(self.spec), rank), parts.get(rank, Part()))

        with ThreadPoolExecutor(THREADS) as readers:
            writers = dict(zip(self._due, readers.map(begun, self._due), strict=True))
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
        for model in self.spec.models:
            name = names[f"{model.prefix}.{RANK}"]
            for rank, writer in writers.items():
                if name not in writer.kept:
                    writer.write(name, torch.tensor([rank % model.head_ranks], dtype=torch.int32))
        weights = [(model, w) for model in self.spec.models for w in table(model.config, self.spec.packing(model))]
        # whole numbers come first in a file
        for model, weight in sorted(weights, key=lambda w: w[1].dtype != "int32"):
            name = names[f"{model.prefix}.{weight.ours}"]
            if missing := {rank: writer for rank, writer in writers.items() if name not in writer.kept}:
                since += self._write(model, weight, name, missing, lanes)
            if since >= PART_BYTES:
                lanes.drain()
                self._note(folder, writers)
                since = 0
        lanes.drain()
        self._note(folder, writers)

    def _write(self, model: PartModel, weight: Weight, name: str, writers: dict[int, ShardWriter], lanes: Lanes) -> int:
        """Have one weight written to these files; returns its bytes."""
        # groups of ranks hold a copy of the draft each
        holders: dict[int, list[int]] = {}
        ranks = model.head_ranks if weight.of_head else model.ranks
        for rank in writers:
            holders.setdefault(rank % ranks, []).append(rank)
        dtype, count = (BY_NAME[weight.dtype] if weight.dtype else BY_FLAG[self.spec.dtype]).torch, 0
        for piece in self._checkpoints[model.prefix].pieces(weight, sorted(holders), ranks, dtype):
            for rank in holders[piece.rank]:
                lanes.give(rank, piece.rows.nbytes, functools.partial(writers[rank].write, name, piece.rows))
                count += piece.rows.nbytes
        return count

    def _note(self, folder: Path, writers: dict[int, ShardWriter]) -> None:
        note = {shard_file(rank): [self._recipes[rank], *writer.part()] for rank, writer in writers.items()}
        temporary = folder / f"{_NOTE}.tmp"
        temporary.write_text(json.dumps(note), encoding="utf-8")
        temporary.replace(folder / _NOTE)

    def _noted(self, folder: Path) -> dict[int, Part]:
        """The parts that an earlier run made of the same shards, by rank."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
            by_rank = {rank: note.get(shard_file(rank), [""]) for rank in self._due}
            return {r: Part(*rest) for r, (recipe, *rest) in by_rank.items() if recipe == self._recipes[r]}
        return {}


def _unfinished(file: Path) -> Path:
    return file.with_name(f"{file.name}.cut")
