"""The NKI kernels behind the seam: the operations of `model/kernels.py` as launches.

Their one field is the function that serves a launch: nkisim at once (`model/nki/simulated.py`), a custom call of a
graph (`compile/graph/custom_call.py`), or the device (`model/nki/on_device.py`).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import KEY_TILE
from model.cache import AttentionMetadata, Cache
from model.kernels import Kernels
from model.nki.filter_floor import best_logit, count_and_mass, filter_floor
from model.nki.launches import LNC, Argument, Launch, Launcher, Result, numbered
from model.ops import Ops, iota
from model.parallel import Shard
from model.rough_filters import RoughFilters
from model.sampling import GUMBEL_DOMAIN, NO_ID, Draw, Draws, Sampling, is_number
from nki_kernels.limits import CHUNK, FORBIDDEN, NO_FLOOR, ROWS, SUM_ROWS

# of marked rows: beyond every score
_LAST, _FIRST = -3e38, 3e38


class NkiKernels(Kernels):
    """The NKI kernels, launched by `launch`; a fused layer runs its own."""

    def __init__(self, launch: Launcher) -> None:
        self.launch = launch

    def run(
        self, kernel: str, arguments: tuple[Argument, ...], *results: Result, changed: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Launch a kernel: its results, then the tensors among the arguments that it changed."""
        plain, tensors = numbered(arguments)
        return self.launch(Launch(kernel, plain, results, changed), tensors)

    def prepare(self, ops: Ops, asked: Sampling, positions_BN: Tensor, shard: Shard) -> Draw:
        """With the shard's first id, and its noise at all positions of a step."""
        return super().prepare(ops, asked, positions_BN, shard)._replace(start_11=shard.start)

    def _noise(self, ops: Ops, draw: Draw, shard: Shard) -> Tensor:
        if shard.ids_V is not None:
            # the kernel counts ids; those of a small vocabulary are anywhere
            return super()._noise(ops, draw, shard)
        parts: list[Tensor] = []
        for seeds, positions in zip(draw.seed_R2.split(ROWS), draw.position_R[:, None].split(ROWS), strict=True):
            result = Result((positions.shape[0], shard.width), "float32")
            parts += self.run("gumbel_noise", (seeds, positions, shard.start, shard.width, GUMBEL_DOMAIN), result)
        return torch.cat(parts)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> Draws:
        assert draw.noise_RV is not None, "draws need the noise of prepare"
        logits_RV = draw.adjusted(logits_RV)
        best_R = logits_RV.amax(-1)
        # false for NaN too: the kernels get numbers alone
        logits_RV = torch.where(logits_RV.abs() < -NO_FLOOR, logits_RV, FORBIDDEN)
        floor = self._floor(ops, logits_RV, draw).clamp(min=NO_FLOOR)
        parts = list[Tensor]()
        for first in range(0, logits_RV.shape[0], ROWS):
            part = slice(first, first + ROWS)
            rows = (logits_RV[part], draw.noise_RV[part], draw.temperature_R[part, None], floor[part, None])
            shape = (LNC, rows[0].shape[0])
            results = (Result(shape, "float32"), Result(shape, "int32"))
            values, ids = self.run("coupled_sample", (*rows, draw.start_11), *results)
            parts.append(_of_cores(values, ids.float()))
        # a collective for both: ids are exact in fp32
        best = _of_shards(ops, _marked(torch.cat(parts, 1), best_R))
        return Draws(best[:, 0], best[:, 1].to(torch.int32))

    def join(self, ops: Ops, x_RC: Tensor) -> Tensor:
        """Each rank has its own ids' logits."""
        return ops.all_gather(x_RC)

    def _floor(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> Tensor:
        """(R,) each row's smallest kept logit: exact for a target's draw, one of a few guesses for a draft's."""
        lowest, filtering_R = torch.full_like(draw.temperature_R, NO_FLOOR), draw.filtering_R
        if filtering_R is None or draw.filters is None:
            return lowest
        if isinstance(draw.filters, RoughFilters):
            best = best_logit(ops, logits_RV)
            sums = functools.partial(count_and_mass, ops, logits_RV, (1 / draw.heat_R, best), self._weights_above)
            floor = draw.filters.floor(best, draw.heat_R, sums)
        else:
            floor = ops.shared(filter_floor, logits_RV, (draw.heat_R, draw.filters), weigh=self._weights_above)
        return torch.where(filtering_R, floor, lowest)

    def _weights_above(
        self, logits_RV: Tensor, scale_R: Tensor, bias_R: Tensor, floor_R: Tensor, thresholds_RJ: Tensor
    ) -> Tensor:
        parts = []
        for first in range(0, logits_RV.shape[0], SUM_ROWS):
            part = slice(first, first + SUM_ROWS)
            columns = (t[part, None] for t in (scale_R, bias_R, floor_R))
            result = Result((LNC, thresholds_RJ.shape[1], logits_RV[part].shape[0]), "float32")
            (sums,) = self.run("weights_above", (logits_RV[part], *columns, thresholds_RJ[part]), result)
            parts.append(sums.sum(0).T)
        return torch.cat(parts)

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, count = draws.ids.shape[1:]
        column = torch.zeros_like(limit_B)[:, None]
        steps = (drafts_BK, column, limit_B[:, None]) if count > 1 else (None, column, None)
        results = (Result((batch, count), "int32"), *(Result((batch, 1), "int32"),) * 3)
        accepted, counts, following, _ = self.run("accept_drafts", (draws.values, draws.ids, *steps), *results)
        return accepted, counts, following

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        result, table_BL, positions_BN = like(q_BHND), whole_chunks(meta), meta.positions_BN
        if q_BHND.shape[2] % KEY_TILE:
            # a tree whose rows are all ancestors of each other
            whole = torch.full_like(positions_BN, (1 << positions_BN.shape[1]) - 1)
            ancestors = () if meta.attend_to_B1 is None else (whole,)
            arguments = (q_BHND, *new, *cache, positions_BN, table_BL, *ancestors)
            out, keys, values = self.run("verify_attention", arguments, result, changed=(3, 4))
            return out, Cache(keys, values)
        # a prompt: its rows are written before any is attended
        first_BN, count = positions_BN[:, :1], q_BHND.shape[2]
        pools = self.run("append_rows", (*new, *cache, positions_BN, table_BL), changed=(2, 3))
        if count == KEY_TILE:
            (out,) = self.run("prompt_attention", (q_BHND, *pools, first_BN, table_BL), result)
            return out, Cache(*pools)
        # the kernel's rows end with the keys at the latest: where ours would end behind them, earlier ones make room
        start_BN, rows_N = first_BN.clamp(max=table_BL.shape[1] * KEY_TILE - count), iota(count, first_BN)
        shift_N = (first_BN - start_BN)[0]
        moved = q_BHND[:, :, (rows_N - shift_N).clamp(min=0)]
        (out,) = self.run("prompt_attention", (moved, *pools, start_BN, table_BL), result)
        return out[:, :, (rows_N + shift_N).clamp(max=count - 1)], Cache(*pools)


def like(x: Tensor) -> Result:
    """A result of a tensor's shape and dtype."""
    return Result(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def whole_chunks(meta: AttentionMetadata) -> Tensor:
    """The block table, filled up with block 0 to the chunks of keys that attention's kernels read."""
    return F.pad(meta.block_table_BL, (0, -meta.block_table_BL.shape[1] % (CHUNK // KEY_TILE)))


def _of_cores(values_LR: Tensor, ids_LR: Tensor) -> Tensor:
    """(2, R): the best value of the cores, each of which drew from its own part of the ids, and its smallest id."""
    first_R = values_LR[0] >= values_LR[-1]
    return torch.stack([torch.where(first_R, drawn[0], drawn[-1]) for drawn in (values_LR, ids_LR)])


def _marked(drawn_2R: Tensor, best_R: Tensor) -> Tensor:
    """(2, R) this rank's values and ids: NO_ID above all others where a logit is NaN or +inf, below if all are -inf."""
    value_R = torch.where(best_R <= NO_FLOOR, _LAST, _FIRST)
    marked_2R = torch.stack((value_R, torch.full_like(value_R, float(NO_ID))))
    return torch.where(is_number(best_R) & (best_R > NO_FLOOR), drawn_2R, marked_2R)


def _of_shards(ops: Ops, columns_CR: Tensor) -> Tensor:
    """(M, C, R): the C numbers of each row on every rank, in rank order, by one collective."""
    gathered = ops.all_gather(columns_CR.T)
    return gathered.unflatten(-1, (-1, columns_CR.shape[0])).permute(1, 2, 0)
