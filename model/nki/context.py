"""The NKI backend: the operations of `model/context.py` as kernel launches.

A launch runs on nkisim immediately (`model/nki/simulated.py`), or becomes a custom call of a graph.
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

# scores of rows without a valid sample: below and above all scores
_LAST, _FIRST = -3e38, 3e38


def no_launch(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The launcher for planning, which launches nothing."""
    raise AssertionError(f"{launch.kernel} was launched while planning")


def make_context(
    name: str, tp: int, ops: Ops = EAGER, launch: Launcher = no_launch, layers: int = 1,
    without: tuple[str, ...] = (), fp8: bool = False,
) -> Context:  # fmt: skip
    """The context for a build's `kernels`: "reference" (torch) or "nki"; the other arguments are `NkiContext`'s."""
    return NkiContext(tp, ops, launch, layers, without, fp8=fp8) if name == "nki" else Context(tp, ops, fp8=fp8)


@dataclass(frozen=True)
class NkiContext(Context):
    """One of `tp` ranks with NKI kernels. `layers`: layers per launch at most; `without`: kernels that become HLO."""

    launch: Launcher = no_launch
    layers: int = 1
    without: tuple[str, ...] = ()
    sharded: ClassVar[bool] = True

    def packing(self, config: ModelConfig) -> Packing:
        full = config.hidden_size % KEY_TILE == 0
        # the kernel splits the columns of gate and up between the cores
        split = config.intermediate_size // self.tp % LNC == 0
        attention = full and config.head_dim == 128 and not ATTENTION_KERNELS.intersection(self.without)
        mlp = full and split and not MLP_KERNELS.intersection(self.without)
        head = pack_head if full and "prompt_product" not in self.without else None
        fp8 = self.is_fp8(config)
        tables = (PACKED_ATTENTION_FP8, PACKED_MLP_FP8) if fp8 else (PACKED_ATTENTION, PACKED_MLP)
        return Packing(tables[0] if attention else {}, tables[1] if mlp else {}, head, fp8)

    def fuse(self, model: M) -> M:
        return fuse(super().fuse(model), self, (self.run, self.attend), 1 if LAYERS in self.without else self.layers)

    def run(
        self, kernel: str, arguments: tuple[Argument, ...], *results: Result, changed: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Launches a kernel. Returns its results, then the tensors with the numbers `changed`, which it updates."""
        if kernel in self.without:
            return IN_HLO[kernel](self.ops, *arguments)
        plain, tensors = numbered(arguments)
        return self.launch(Launch(kernel, plain, results, changed), tensors)

    def attention(
        self, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        # the kernels apply no scale; exact for head dims 64 and 256
        return self.attend(q_BHND * q_BHND.shape[-1] ** -0.5, k_BGND, v_BGND, cache, meta)

    def attend(
        self, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        """`attention` of queries that have the factor 1 / sqrt(D)."""
        result, positions_BN = like(q_BHND), meta.positions_BN
        first_BN, count = positions_BN[:, :1], q_BHND.shape[2]
        # prefill rows are tiled; the rows of a step are on the partitions all at once
        group_rows = q_BHND.shape[1] // cache.k.shape[1] * count if count % KEY_TILE else 1
        table_BL = padded_table(meta, cache, group_rows)
        if count % KEY_TILE:
            limit = () if meta.attend_to_B1 is None else (meta.attend_to_B1,)
            arguments = (q_BHND, k_BGND, v_BGND, *cache, positions_BN, table_BL, *limit)
            out, keys, values = self.run("verify_attention", arguments, result, changed=(3, 4))
            return out, Cache(keys, values)
        # a prefill chunk: all rows are written before any is attended
        pools = self.run("append_rows", (k_BGND, v_BGND, *cache, positions_BN, table_BL), changed=(2, 3))
        if count == KEY_TILE:
            (out,) = self.run("prompt_attention", (q_BHND, *pools, first_BN, table_BL), result)
            return out, Cache(*pools)
        # the kernel requires first + count <= keys. If the chunk's padding exceeds that, start earlier and shift rows
        start_BN, rows_N = first_BN.clamp(max=table_BL.shape[1] * KEY_TILE - count), iota(count, first_BN)
        shift_N = (first_BN - start_BN)[0]
        shifted = q_BHND[:, :, (rows_N - shift_N).clamp(min=0)]
        (out,) = self.run("prompt_attention", (shifted, *pools, start_BN, table_BL), result)
        return out[:, :, (rows_N + shift_N).clamp(max=count - 1)], Cache(*pools)

    def gumbel_noise(self, seed_R2: Tensor, position_R: Tensor, shard: VocabShard) -> Tensor:
        if shard.mapped_V is not None:
            # the kernel supports consecutive ids only
            return super().gumbel_noise(seed_R2, position_R, shard)
        parts: list[Tensor] = []
        for seeds, positions in zip(seed_R2.split(ROWS), position_R[:, None].split(ROWS), strict=True):
            result = Result((positions.shape[0], shard.width), "float32")
            parts += self.run("gumbel_noise", (seeds, positions, shard.start_11, shard.width, GUMBEL_DOMAIN), result)
        return torch.cat(parts)

    def sample(self, logits_RV: Tensor, params: SamplingParams, noise_RV: Tensor, shard: VocabShard) -> ShardArgmax:
        best_R = logits_RV.amax(-1)
        # false for NaN, too: the kernels require finite logits
        logits_RV = torch.where(logits_RV.abs() < -NO_FLOOR, logits_RV, FORBIDDEN)
        floor_R = self._floor(logits_RV, params, shard.rank_11).clamp(min=NO_FLOOR)
        parts = list[Tensor]()
        for first in range(0, logits_RV.shape[0], ROWS):
            part = slice(first, first + ROWS)
            rows = (logits_RV[part], noise_RV[part], params.temperature_R[part, None], floor_R[part, None])
            shape = (LNC, rows[0].shape[0])
            results = (Result(shape, "float32"), Result(shape, "int32"))
            values, ids = self.run("coupled_sample", (*rows, shard.start_11), *results)
            # core 0 samples from the lower ids, so ties go to core 0
            of_cores, first_R = (values, ids.float()), values[0] >= values[-1]
            parts.append(torch.stack([torch.where(first_R, t[0], t[-1]) for t in of_cores]))
        # one collective for scores and ids, which are exact in fp32
        gathered = self.ops.all_gather(_with_no_id(torch.cat(parts, 1), best_R).T, shard.rank_11)
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
        """(R,) each row's cutoff: exact for the target, approximate for drafts."""
        lowest_R = torch.full_like(params.temperature_R, NO_FLOOR)
        if params.filters is None or params.filtering_R is None:
            return lowest_R
        if isinstance(params.filters, ApproxFilters):
            gather = functools.partial(self.ops.all_gather, rank_11=rank_11)
            best_R = best_logit(gather, logits_RV)
            scale = (1 / params.divisor_R, best_R)
            sums = functools.partial(count_and_mass, gather, logits_RV, scale, self._weights_above)
            floor_R = params.filters.floor(best_R, params.divisor_R, sums)
        else:
            filters = (params.divisor_R, params.filters)
            floor_R = self.ops.jit(filter_floor, rank_11, logits_RV, filters, weigh=self._weights_above)
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


def _with_no_id(best_2R: Tensor, logit_R: Tensor) -> Tensor:
    """(2, R) this rank's best scores and ids. Rows with NaN or +inf have NO_ID with the highest score, so that it wins
    over all ranks; rows that are all -inf have NO_ID with the lowest score."""
    value_R = torch.where(logit_R <= NO_FLOOR, _LAST, _FIRST)
    marked_2R = torch.stack((value_R, torch.full_like(value_R, float(NO_ID))))
    return torch.where(is_finite(logit_R) & (logit_R > NO_FLOOR), best_2R, marked_2R)
