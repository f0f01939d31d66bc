"""Shards of a build, cut for all ranks in one pass over the checkpoints; threads hash and write the ranks' files."""

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
from trnspec.bundle.checkpoint import open_checkpoints
from trnspec.bundle.manifest import canonical_hash, sha256_of
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.shards import shard_header, shard_specs

_THREADS = min(4, os.cpu_count() or 1)


class _Shard:
    """A rank's file under construction."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.file, self.digest = path.open("xb"), sha256()
        self.write(header)

    def write(self, content: bytes | memoryview) -> None:
        self.digest.update(content)
        self.file.write(content)


class Cutter:
    """The shards of a plan from the checkpoints in `folders`, by the role of their model."""

    def __init__(self, plan: BundlePlan, folders: Mapping[str, Path]) -> None:
        self.plan = plan
        self._checkpoints = open_checkpoints(plan.spec.parts, folders)
        self._weights = dict[str, tuple[str, Weight]]()
        for part in plan.spec.parts:
            self._weights |= {f"{part.prefix}.{weight.name}": (part.role, weight) for weight in part.weights}

    def recipes(self) -> list[str]:
        """The recipe of each rank's shard: the content of the checkpoints and the file's header."""
        with ThreadPoolExecutor(_THREADS) as pool:
            made_of = [cut_code(), {role: list(pool.map(sha256_of, c.files)) for role, c in self._checkpoints.items()}]
        headers = (shard_header(self.plan, rank) for rank in range(self.plan.spec.tp))
        return [canonical_hash([*made_of, sha256(header).hexdigest()]) for header in headers]

    def write(self, paths: Mapping[int, Path]) -> dict[int, str]:
        """Write the shards of these ranks; returns the sha256 of each."""
        shards = {rank: _Shard(path, shard_header(self.plan, rank)) for rank, path in paths.items()}
        last, threads = dict[int, Future[None]](), torch.get_num_threads()
        # the pool uses the cores: a copy by many threads would wait for its last one
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for spec in shard_specs(self.plan):
                    for rank, tensor in enumerate(self._of_ranks(spec)):
                        if rank not in shards:
                            continue
                        assert (tensor.dtype, tensor.shape) == (BY_NAME[spec.dtype].torch, spec.shape), spec.name
                        if rank in last:
                            last[rank].result()
                        content = tensor.contiguous().view(torch.uint8).view(-1).numpy().data
                        last[rank] = pool.submit(shards[rank].write, content)
                for written in last.values():
                    written.result()
        finally:
            torch.set_num_threads(threads)
        for shard in shards.values():
            shard.file.close()
        return {rank: shard.digest.hexdigest() for rank, shard in shards.items()}

    def _of_ranks(self, spec: TensorSpec) -> Iterable[Tensor]:
        if spec.name not in self._weights:
            return torch.arange(self.plan.spec.tp, dtype=torch.int32).split(1)
        role, weight = self._weights[spec.name]
        return self._checkpoints[role].shards(weight, self.plan.spec.tp, BY_NAME[spec.dtype].torch)
