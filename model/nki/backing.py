"""The NKI kernels behind the seam: the operations of `model/kernels.py` as launches.

Who serves a launch is the backing's one field: nkisim at once (`model/nki/simulated.py`), a custom call of a graph
(`compile/graph/custom_call.py`), or the device. What a kernel cannot take is left to the reference, piece by piece.
The fused layers' weights are packed in the bundle (`model/packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.cache import Cache, Layout, Rows
from model.config import Qwen3Config
from model.fused_layer import PackedAttention, PackedMLP
from model.kernels import Kernels
from model.nki.filter_floor import NO_FLOOR, best_logit, filter_floor, over_ranks
from model.nki.launches import Argument, Launch, Result, numbered
from model.ops import Ops
from model.packing import fused_packing
from model.parallel import Parallel, Shard
from model.qwen3 import MLP, Attention
from model.rejection import ACCEPT_DOMAIN, NOTHING, RESIDUAL_DOMAIN, Drafted
from model.sampling import GUMBEL_DOMAIN, Draws, Sampling

# rows of noise, draws and layers, and of sums, that a launch takes; new rows of a sequence for attention
_ROWS, _SUM_ROWS, _CANDIDATES = 128, 32, 32
_PARTITIONS = 128


class NkiKernels(Kernels):
    """The NKI kernels, launched by `launch`."""

    layout = Layout(transposed_keys=True, margin=_CANDIDATES)
    packing = staticmethod(fused_packing)
    sharded = True

    def __init__(self, launch: Callable[[Launch, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
        self.launch = launch

    def halves(self, config: Qwen3Config, parallel: Parallel) -> tuple[Attention, MLP]:
        packed = self.packing(config, parallel.tp)
        attention = (PackedAttention if packed.attention else Attention)(config, parallel, self)
        return attention, (PackedMLP if packed.mlp else MLP)(config, parallel)

    def _run(
        self, kernel: str, arguments: tuple[Argument, ...], *results: Result, changed: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        plain, tensors = numbered(arguments)
        return self.launch(Launch(kernel, plain, results, changed), tensors)

    def prepare(self, ops: Ops, drawn: Sampling, positions_BN: Tensor, shard: Shard) -> Sampling:
        """The shard's first id, and its noise at all positions of a step."""
        noisy = drawn.temperature_R > 0
        positions_R, seeds = positions_BN.flatten(), drawn.seed_R2.repeat_interleave(positions_BN.shape[1], 0)
        noise = ops.cond(
            noisy.any(),
            lambda: self._noise(seeds, positions_R, shard),
            lambda: torch.zeros(positions_R.shape[0], shard.width, device=positions_R.device),
        )
        return drawn._replace(noise_BNV=noise.unflatten(0, positions_BN.shape), start_11=shard.start)

    def _noise(self, seeds_R2: Tensor, positions_R: Tensor, shard: Shard, domain: int = GUMBEL_DOMAIN) -> Tensor:
        parts: list[Tensor] = []
        for seeds, positions in zip(seeds_R2.split(_ROWS), positions_R[:, None].split(_ROWS), strict=True):
            result = Result((positions.shape[0], shard.width), "float32")
            parts += self._run("gumbel_noise", (seeds, positions, *shard, domain), result)
        return torch.cat(parts)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, drawn: Sampling, positions_R: Tensor) -> Draws:
        assert drawn.noise_BNV is not None, "draws need what prepare gives"
        filtering = (drawn.top_k_R > 0) | (drawn.top_p_R < 1) | (drawn.min_p_R > 0)
        filtering &= drawn.temperature_R > 0
        lowest = torch.full_like(drawn.temperature_R, NO_FLOOR)
        floor = ops.cond(
            filtering.any(), lambda: filter_floor(ops, logits_RV, drawn, self._weights_above), lambda: lowest
        )
        floor = torch.where(filtering, floor, lowest)
        noise_RV, found = drawn.noise_BNV.flatten(0, 1), []
        for first in range(0, logits_RV.shape[0], _ROWS):
            part = slice(first, first + _ROWS)
            given = (logits_RV[part], noise_RV[part], drawn.temperature_R[part, None], floor[part, None])
            shape = (1, given[0].shape[0])
            results = (Result(shape, "float32"), Result(shape, "int32"))
            values, ids = self._run("coupled_sample", (*given, drawn.start_11), *results)
            found.append(torch.cat((values, ids.float())))
        # a collective for both: ids are exact in fp32
        best = _of_shards(ops, torch.cat(found, 1))
        return Draws(best[:, 0], best[:, 1].to(torch.int32))

    def _weights_above(
        self, logits_RV: Tensor, scale_R: Tensor, bias_R: Tensor, floor_R: Tensor, thresholds_RJ: Tensor
    ) -> Tensor:
        parts = []
        for first in range(0, logits_RV.shape[0], _SUM_ROWS):
            part = slice(first, first + _SUM_ROWS)
            columns = (t[part, None] for t in (scale_R, bias_R, floor_R))
            result = Result((1, thresholds_RJ.shape[1], logits_RV[part].shape[0]), "float32")
            parts.append(self._run("weights_above", (logits_RV[part], *columns, thresholds_RJ[part]), result)[0][0].T)
        return torch.cat(parts)

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, count = draws.ids.shape[1:]
        column = torch.zeros_like(limit_B)[:, None]
        steps = (drafts_BK, column, limit_B[:, None]) if count > 1 else (None, column, None)
        results = (Result((batch, count), "int32"), *(Result((batch, 1), "int32"),) * 3)
        accepted, counts, following, _ = self._run("accept_drafts", (*draws, *steps), *results)
        return accepted, counts, following

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, rows: Rows
    ) -> tuple[Tensor, Cache]:
        if rows.slots_B is None:
            return self._attend(q_BHND, new, cache, rows.positions_BN)
        # a prompt goes into its slot in pieces; how it is split has no say in a row's bits
        taken = Cache(*(c.index_select(0, rows.slots_B) for c in cache))
        heads, count = q_BHND.shape[1:3]
        step = min(_CANDIDATES, _PARTITIONS // (heads // cache.v.shape[1]))
        parts = []
        for first in range(0, count, step):
            part = slice(first, first + step)
            pieces = (new[0][:, :, part], new[1][:, :, part])
            out, taken = self._attend(q_BHND[:, :, part], pieces, taken, rows.positions_BN[:, part])
            parts.append(out)
        index = torch.arange(cache.v.shape[0], dtype=torch.int32, device=q_BHND.device)
        here = (index == rows.slots_B)[:, None, None, None]
        return torch.cat(parts, 2), Cache(*(torch.where(here, t, c) for t, c in zip(taken, cache, strict=True)))

    def _attend(
        self, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, positions_BN: Tensor
    ) -> tuple[Tensor, Cache]:
        result = Result(tuple(q_BHND.shape), str(q_BHND.dtype).removeprefix("torch."))
        out, k, v = self._run("verify_attention", (q_BHND, *new, *cache, positions_BN), result, changed=(3, 4))
        return out, Cache(k, v)

    def rejection_sample(
        self, ops: Ops, target_BNV: Tensor, drafted: Drafted, drawn: Sampling, positions_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, count, width = target_BNV.shape
        rows, index = drawn.rows(count), torch.arange(count, dtype=torch.int32, device=target_BNV.device)
        positions_BN = positions_B1 + index
        target = target_BNV.flatten(0, 1)
        # the last row, and those from the limit on, have no draft: their residual is the target
        draft = torch.nn.functional.pad(drafted.logits_BKV, (0, 0, 0, 1)).flatten(0, 1)
        alone = (index >= drafted.limit_B.clamp(max=count - 1)[:, None]).flatten()
        scales = [self._probabilities(ops, x, rows) for x in (target, draft)]
        scales[1] = torch.where(alone[:, None] & (torch.arange(3) == 1), NOTHING, scales[1])
        ids = torch.nn.functional.pad(drafted.ids_BK, (0, 1)).flatten()[:, None]
        start = torch.zeros_like(index[:1, None]) if drawn.start_11 is None else drawn.start_11
        noise = self._noise(rows.seed_R2, positions_BN.flatten(), Shard(start, width), RESIDUAL_DOMAIN)
        column = torch.ones_like(rows.temperature_R)[:, None]
        total = batch * count
        given = (target, draft, torch.cat(scales, 1), column, ids, noise, start)
        shapes = (Result((1, 3, total), "float32"), Result((1, total), "float32"), Result((1, total), "int32"))
        sums, values, draws = self._run("rejection_sample", given, *shapes)
        at = (rows.seed_R2, positions_BN.flatten()[:, None], ACCEPT_DOMAIN)
        u = self._run("uniform", at, Result((total, 1), "float32"))
        shards = _of_shards(ops, torch.cat((sums[0], values, draws.float()))).unflatten(2, (batch, count))
        parts = (shards[:, :3], shards[:, 3], shards[:, 4].to(torch.int32), u[0].reshape(batch, count))
        step = (drafted.ids_BK, torch.zeros_like(positions_B1), drafted.limit_B[:, None])
        results = (Result((batch, count), "int32"), *(Result((batch, 1), "int32"),) * 3)
        accepted, counts, _, _ = self._run("accept_rejection", (*parts, *step), *results)
        return accepted, counts

    def _probabilities(self, ops: Ops, logits_RV: Tensor, rows: Sampling) -> Tensor:
        """(R, 3): factor, bias and floor that turn logits into the probabilities that are drawn from."""
        floor = filter_floor(ops, logits_RV, rows, self._weights_above)
        scale, best = 1 / rows.temperature_R, best_logit(ops, logits_RV)
        lowest = torch.full_like(best, NO_FLOOR)[:, None]
        mass = over_ranks(ops, self._weights_above(logits_RV, scale, -best * scale, floor, lowest))[:, 0]
        return torch.stack((scale, -best * scale - torch.log(mass), floor), 1)

    def mlp_half(self, ops: Ops, norm: Any, half: Any, x_BNE: Tensor) -> Tensor:
        if not isinstance(half, PackedMLP) or not _few_rows(x_BNE):
            return super().mlp_half(ops, norm, half, x_BNE)
        x_RE, packed = x_BNE.flatten(0, 1), (half.gate_up_packed, half.down_packed)
        result = Result(tuple(x_RE.shape), str(x_RE.dtype).removeprefix("torch."))
        (part,) = self._run("decode_mlp", (x_RE, norm.weight, *packed, norm.eps), result)
        return ops.all_reduce(part.reshape(x_BNE.shape))

    def attention_half(self, ops: Ops, norm: Any, half: Any, x_BNE: Tensor, *rows: Any) -> tuple[Tensor, Cache]:
        angles, cache, at = rows
        if not isinstance(half, PackedAttention) or not _few_rows(x_BNE) or not _fit_attention(half, x_BNE, at):
            return super().attention_half(ops, norm, half, x_BNE, *rows)
        x_RE = x_BNE.flatten(0, 1)
        norms = (norm.weight, half.k_norm.weight, half.q_norm.weight)
        weights = (half.qkv_packed, half.out_packed)
        given = (x_RE, norms, weights, (angles.cos(), angles.sin()), tuple(cache), at.positions_BN, norm.eps)
        result = Result(tuple(x_RE.shape), str(x_RE.dtype).removeprefix("torch."))
        part, keys, values = self._run("decode_attention", given, result, changed=(8, 9))
        return ops.all_reduce(part.reshape(x_BNE.shape)), Cache(keys, values)


def _of_shards(ops: Ops, columns_CR: Tensor) -> Tensor:
    """(M, C, R): the C numbers of each row on every rank, in rank order, by one collective."""
    gathered = ops.all_gather(columns_CR.T)
    return gathered.unflatten(-1, (-1, columns_CR.shape[0])).permute(1, 2, 0)


def _few_rows(x_BNE: Tensor) -> bool:
    """Whether the fused layer kernels take these rows."""
    return x_BNE.shape[0] * x_BNE.shape[1] <= _ROWS


def _fit_attention(half: PackedAttention, x_BNE: Tensor, at: Rows) -> bool:
    """Whether the rows of a sequence fit beside each other, and stand in a cache of their own."""
    count, heads_per_kv = x_BNE.shape[1], half.out_packed.shape[1] // half.kv_features
    return at.slots_B is None and count <= _CANDIDATES and heads_per_kv * count <= _PARTITIONS


BACKINGS: dict[str, type[Kernels]] = {"reference": Kernels, "nki": NkiKernels}
