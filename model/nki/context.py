"""The NKI backend: the operations of `model/context.py` as launches of kernels.

A launch is served by nkisim at once (`model/nki/simulated.py`), or is a custom call of a graph.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from model.approx_filters import ApproxFilters
from model.cache import KEY_TILE, AttentionMetadata, Cache
from model.config import ModelConfig
from model.context import Context, M
from model.nki.filter_floor import best_logit, count_and_mass, filter_floor
from model.nki.fused_layer import PACKED_ATTENTION, PACKED_ATTENTION_FP8, PACKED_MLP, PACKED_MLP_FP8, fuse
from model.nki.in_hlo import ATTENTION_KERNELS, IN_HLO, MLP_KERNELS
from model.nki.launches import LAYERS, LNC, Argument, Launch, Launcher, Result, like, numbered, padded_table
from model.ops import EAGER, Ops, iota
from model.parallel import VocabShard
from model.sampling import GUMBEL_DOMAIN, NO_ID, SamplingParams, ShardArgmax, is_finite
from model.weights import Packing
from nki_kernels.layer.pack_weights import pack_head
from nki_kernels.limits import FORBIDDEN, NO_FLOOR, ROWS, SUM_ROWS

# scores of marked rows: beyond every other
_LAST, _FIRST = -3e38, 3e38


def no_launch(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Refuses every launch: a plan reads a backend's facts only."""
    raise AssertionError(f"{launch.kernel} was launched while planning")


def make_context(
    name: str, tp: int, ops: Ops = EAGER, launch: Launcher = no_launch, layers: int = 1,
    without: tuple[str, ...] = (), fp8: bool = False,
) -> Context:  # fmt: skip
    """The context of a build's `kernels`: on torch, or on NKI kernels served by `launch`, `layers` at most in one.

    `without`: kernels that become operations of the graph. `fp8`: projections have FP8 weights.
    """
    return NkiContext(tp, ops, fp8, launch, layers, without) if name == "nki" else Context(tp, ops, fp8)


@dataclass(frozen=True)
class NkiContext(Context):
    """One of `tp` ranks, on NKI kernels served by `launch`; at most `layers` are one launch."""

    launch: Launcher = no_launch
    layers: int = 1
    without: tuple[str, ...] = ()
    sharded: ClassVar[bool] = True

    def packing(self, config: ModelConfig) -> Packing:
        full = config.hidden_size % KEY_TILE == 0
        # gate and up are split between two cores
        split = config.intermediate_size // self.tp % LNC == 0
        attention = full and config.head_dim == 128 and not ATTENTION_KERNELS.intersection(self.without)
        mlp = full and split and not MLP_KERNELS.intersection(self.without)
        head = pack_head if full and "prompt_product" not in self.without else None
        fp8 = self.is_fp8(config)
        tables = (PACKED_ATTENTION_FP8, PACKED_MLP_FP8) if fp8 else (PACKED_ATTENTION, PACKED_MLP)
        return Packing(tables[0] if attention else {}, tables[1] if mlp else {}, head, fp8)

    def fuse(self, model: M) -> M:
        return fuse(super().fuse(model), self, self.run, 1 if LAYERS in self.without else self.layers)

    def run(
        self, kernel: str, arguments: tuple[Argument, ...], *results: Result, changed: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Launch a kernel: its results, then the tensors among the arguments that it changed."""
        if kernel in self.without:
            return IN_HLO[kernel](self.ops, *arguments)
        plain, tensors = numbered(arguments)
        return self.launch(Launch(kernel, plain, results, changed), tensors)

    def attention(
        self, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        result, positions_BN = like(q_BHND), meta.positions_BN
        first_BN, count = positions_BN[:, :1], q_BHND.shape[2]
        # a prompt's rows are tiled, a step's are all on the partitions
        group_rows = q_BHND.shape[1] // cache.k.shape[1] * count if count % KEY_TILE else 1
        table_BL = padded_table(meta, cache, group_rows)
        if count % KEY_TILE:
            limit = () if meta.attend_to_B1 is None else (meta.attend_to_B1,)
            arguments = (q_BHND, k_BGND, v_BGND, *cache, positions_BN, table_BL, *limit)
            out, keys, values = self.run("verify_attention", arguments, result, changed=(3, 4))
            return out, Cache(keys, values)
        # a prompt: its rows are written before any is attended
        pools = self.run("append_rows", (k_BGND, v_BGND, *cache, positions_BN, table_BL), changed=(2, 3))
        if count == KEY_TILE:
            (out,) = self.run("prompt_attention", (q_BHND, *pools, first_BN, table_BL), result)
            return out, Cache(*pools)
        # the kernel's rows end with the keys at the latest: where ours would end after them, earlier ones make room
        start_BN, rows_N = first_BN.clamp(max=table_BL.shape[1] * KEY_TILE - count), iota(count, first_BN)
        shift_N = (first_BN - start_BN)[0]
        moved = q_BHND[:, :, (rows_N - shift_N).clamp(min=0)]
        (out,) = self.run("prompt_attention", (moved, *pools, start_BN, table_BL), result)
        return out[:, :, (rows_N + shift_N).clamp(max=count - 1)], Cache(*pools)

    def gumbel_noise(self, seed_R2: Tensor, position_R: Tensor, shard: VocabShard) -> Tensor:
        if shard.mapped_V is not None:
            # the kernel counts ids; those of a small vocabulary are anywhere
            return super().gumbel_noise(seed_R2, position_R, shard)
        parts: list[Tensor] = []
        for seeds, positions in zip(seed_R2.split(ROWS), position_R[:, None].split(ROWS), strict=True):
            result = Result((positions.shape[0], shard.width), "float32")
            parts += self.run("gumbel_noise", (seeds, positions, shard.start_11, shard.width, GUMBEL_DOMAIN), result)
        return torch.cat(parts)

    def sample(self, logits_RV: Tensor, params: SamplingParams, noise_RV: Tensor, shard: VocabShard) -> ShardArgmax:
        best_R = logits_RV.amax(-1)
        # false for NaN too: the kernels get numbers only
        logits_RV = torch.where(logits_RV.abs() < -NO_FLOOR, logits_RV, FORBIDDEN)
        floor_R = self._floor(logits_RV, params, shard.rank_11).clamp(min=NO_FLOOR)
        parts = list[Tensor]()
        for first in range(0, logits_RV.shape[0], ROWS):
            part = slice(first, first + ROWS)
            rows = (logits_RV[part], noise_RV[part], params.temperature_R[part, None], floor_R[part, None])
            shape = (LNC, rows[0].shape[0])
            results = (Result(shape, "float32"), Result(shape, "int32"))
            values, ids = self.run("coupled_sample", (*rows, shard.start_11), *results)
            # a core samples from a part of the ids, in their order: of equal values the first one's is the smaller id
            of_cores, first_R = (values, ids.float()), values[0] >= values[-1]
            parts.append(torch.stack([torch.where(first_R, t[0], t[-1]) for t in of_cores]))
        # a collective for both: ids are exact in fp32
        gathered = self.ops.all_gather(_marked(torch.cat(parts, 1), best_R).T, shard.rank_11)
        best = gathered.unflatten(-1, (-1, 2)).permute(1, 2, 0)
        return ShardArgmax(best[:, 0], best[:, 1].to(torch.int32))

    def all_gather_vocab(self, x_RC: Tensor, shard: VocabShard) -> Tensor:
        return self.ops.all_gather(x_RC, shard.rank_11)

    def accept(self, drafts_BK: Tensor, samples: ShardArgmax, max_accepted_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, count = samples.ids.shape[1:]
        column = torch.zeros_like(max_accepted_B)[:, None]
        steps = (drafts_BK, column, max_accepted_B[:, None]) if count > 1 else (None, column, None)
        results = (Result((batch, count), "int32"), *(Result((batch, 1), "int32"),) * 3)
        accepted, counts, last, _ = self.run("accept_drafts", (samples.values, samples.ids, *steps), *results)
        return accepted, counts, last

    def _floor(self, logits_RV: Tensor, params: SamplingParams, rank_11: Tensor) -> Tensor:
        """(R,) each row's smallest kept logit: exact for a target's sample, approximate for a draft's."""
        lowest_R = torch.full_like(params.temperature_R, NO_FLOOR)
        if params.filters is None or params.filtering_R is None:
            return lowest_R
        if isinstance(params.filters, ApproxFilters):
            gather = functools.partial(self.ops.all_gather, rank_11=rank_11)
            best_R = best_logit(gather, logits_RV)
            by = (1 / params.divisor_R, best_R)
            sums = functools.partial(count_and_mass, gather, logits_RV, by, self._weights_above)
            floor_R = params.filters.floor(best_R, params.divisor_R, sums)
        else:
            by_T = (params.divisor_R, params.filters)
            floor_R = self.ops.shared(filter_floor, rank_11, logits_RV, by_T, weigh=self._weights_above)
        return torch.where(params.filtering_R, floor_R, lowest_R)

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


def _marked(best_2R: Tensor, logit_R: Tensor) -> Tensor:
    """(2, R) this rank's values and ids: NO_ID above all others where a logit is NaN or +inf, below if all are -inf."""
    value_R = torch.where(logit_R <= NO_FLOOR, _LAST, _FIRST)
    marked_2R = torch.stack((value_R, torch.full_like(value_R, float(NO_ID))))
    return torch.where(is_finite(logit_R) & (logit_R > NO_FLOOR), best_2R, marked_2R)
