"""Shards of a build, cut for all ranks in one pass over the checkpoints; threads hash and write the ranks' files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from compile.recipes import cut_code
from model.dtypes import BY_NAME
from model.graph_spec import TensorSpec
from model.weights import Weight
from trnspec.bundle.checkpoint import Checkpoint, Piece
from trnspec.bundle.manifest import canonical_hash, sha256_of
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.shards import shard_header, shard_specs

_THREADS = min(4, os.cpu_count() or 1)


class ShardWriter:
    """A rank's file under construction, its tensors in the order of the plan."""

    def __init__(self, path: Path, specs: list[TensorSpec], header: bytes) -> None:
        self._specs, self._out, self._digest = iter(specs), path.open("xb"), sha256()
        self._spec = next(self._specs)
        self._missing = self._spec.bytes
        self._put(header)

    def write(self, name: str, rows: Tensor) -> None:
        """Write the next rows of a tensor, or the first ones of the next tensor."""
        if not self._missing:
            self._spec = next(self._specs)
            self._missing = self._spec.bytes
        planned = (self._spec.name, BY_NAME[self._spec.dtype].torch, self._spec.shape[1:])
        assert planned == (name, rows.dtype, tuple(rows.shape[1:])), f"{name}: {rows.dtype} {tuple(rows.shape)}"
        assert rows.nbytes <= self._missing, f"{name}: {tuple(rows.shape)}"
        self._put(rows.contiguous().view(torch.uint8).view(-1).numpy().data)
        self._missing -= rows.nbytes

    def _put(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self._out.write(content)

    def finish(self) -> str:
        """The sha256 of the file, which is complete."""
        assert not self._missing, f"{self._spec.name} is not complete"
        assert next(self._specs, None) is None, "a tensor was not written"
        self._out.close()
        return self._digest.hexdigest()


class Cutter:
    """The shards of a plan from the checkpoints in `folders`, by the role of their model."""

    def __init__(self, plan: BundlePlan, folders: Mapping[str, Path]) -> None:
        self.plan = plan
        self._checkpoints: dict[str, Checkpoint] = {}
        self._weights = dict[str, tuple[str, Weight]]()
        for part in plan.spec.parts:
            self._checkpoints[part.role] = Checkpoint(folders[part.role], part.config, self._checkpoints.get("target"))
            self._weights |= {f"{part.prefix}.{weight.name}": (part.role, weight) for weight in part.weights}

    def recipes(self) -> list[str]:
        """The recipe of each rank's shard: the content of the checkpoints and the file's header."""
        with ThreadPoolExecutor(_THREADS) as pool:
            made_of = [cut_code(), {role: list(pool.map(sha256_of, c.files)) for role, c in self._checkpoints.items()}]
        headers = (shard_header(self.plan, rank) for rank in range(self.plan.spec.tp))
        return [canonical_hash([*made_of, sha256(header).hexdigest()]) for header in headers]

    def write(self, paths: Mapping[int, Path]) -> dict[int, str]:
        """Write the shards of these ranks; returns the sha256 of each."""
        specs = shard_specs(self.plan)
        writers = {rank: ShardWriter(path, specs, shard_header(self.plan, rank)) for rank, path in paths.items()}
        last, threads = dict[int, Future[None]](), torch.get_num_threads()
        # the pool uses the cores: a copy by many threads would wait for its last one
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for spec in specs:
                    for rank, rows in self._pieces(spec, list(paths)):
                        if rank in last:
                            last[rank].result()
                        last[rank] = pool.submit(writers[rank].write, spec.name, rows)
                for written in last.values():
                    written.result()
        finally:
            torch.set_num_threads(threads)
        return {rank: writer.finish() for rank, writer in writers.items()}

    def _pieces(self, spec: TensorSpec, ranks: list[int]) -> Iterable[Piece]:
        if spec.name not in self._weights:
            return [Piece(rank, torch.tensor([rank], dtype=torch.int32)) for rank in ranks]
        role, weight = self._weights[spec.name]
        return self._checkpoints[role].pieces(weight, ranks, self.plan.spec.tp, BY_NAME[spec.dtype].torch)
