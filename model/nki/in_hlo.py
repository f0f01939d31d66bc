"""Kernels as HLO operations, for builds that leave kernels out (the recipe's `without`).

Each function has the arguments of a launch, and returns its results, then the tensors that it writes. Weights of a
packed layer are not packed if one of its kernels is left out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model import sampling
from model.attention import append, attend
from model.cache import AttentionMetadata, Cache
from model.ops import Ops, first_argmax, iota, ordered_sum
from model.sampling import ShardArgmax

_LOWEST = torch.finfo(torch.float32).min
# the kernels that require packed attention weights, and those that require packed MLP weights
ATTENTION_KERNELS, MLP_KERNELS = {"decode_attention", "prompt_product"}, {"decode_mlp", "prompt_mlp"}


def verify_attention(
    ops: Ops, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, keys: Tensor, values: Tensor, positions_BN: Tensor,
    table_BL: Tensor, limit_B1: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    meta = AttentionMetadata(positions_BN, table_BL, limit_B1)
    cache = append(ops, k_BGND, v_BGND, Cache(keys, values), meta)
    return attend(ops, q_BHND, cache, meta), *cache


def append_rows(
    ops: Ops, k_BGND: Tensor, v_BGND: Tensor, keys: Tensor, values: Tensor, positions_BN: Tensor, table_BL: Tensor
) -> tuple[Tensor, ...]:
    return append(ops, k_BGND, v_BGND, Cache(keys, values), AttentionMetadata(positions_BN, table_BL))


def prompt_attention(
    ops: Ops, q_BHND: Tensor, keys: Tensor, values: Tensor, first_B1: Tensor, table_BL: Tensor
) -> tuple[Tensor, ...]:
    positions_BN = first_B1 + iota(q_BHND.shape[2], first_B1)
    return (attend(ops, q_BHND, Cache(keys, values), AttentionMetadata(positions_BN, table_BL)),)


def gumbel_noise(
    ops: Ops, seed_R2: Tensor, position_R1: Tensor, start_11: Tensor, width: int, domain: int
) -> tuple[Tensor, ...]:
    return (sampling.gumbel_noise(ops, seed_R2, position_R1[:, 0], start_11[0] + iota(width, start_11)),)


def coupled_sample(
    ops: Ops, logits_RV: Tensor, noise_RV: Tensor, temperature_R1: Tensor, floor_R1: Tensor, start_11: Tensor
) -> tuple[Tensor, ...]:
    """Best scores and ids of two cores; core 0 computes all of them, core 1 none."""
    logits_RV = logits_RV.float()
    sampled_R1 = temperature_R1 > 0
    scores_RV = torch.where(sampled_R1, logits_RV / torch.where(sampled_R1, temperature_R1, 1.0) + noise_RV, logits_RV)
    scores_RV = torch.where(logits_RV < floor_R1, _LOWEST, scores_RV)
    value_R, id_R = scores_RV.amax(-1), start_11[0] + first_argmax(scores_RV)
    return torch.stack((value_R, torch.full_like(value_R, _LOWEST))), torch.stack((id_R, id_R))


def weights_above(
    ops: Ops, logits_RV: Tensor, scale_R1: Tensor, bias_R1: Tensor, floor_R1: Tensor, thresholds_RJ: Tensor
) -> tuple[Tensor, ...]:
    """Sums of two cores; core 0 computes all of them, core 1 zeros."""
    logits_RV = logits_RV.float()
    weights_RV = torch.where(logits_RV >= floor_R1, torch.exp(logits_RV * scale_R1 + bias_R1), 0.0)
    above_RJV = logits_RV[:, None] > thresholds_RJ[..., None]
    sums_JR = ordered_sum(torch.where(above_RJV, weights_RV[:, None], 0.0)).T
    return (torch.stack((sums_JR, torch.zeros_like(sums_JR))),)


def accept_drafts(
    ops: Ops, values_MBN: Tensor, ids_MBN: Tensor, drafts_BK: Tensor | None, positions_B1: Tensor,
    limits_B1: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    ids_BN = ShardArgmax(values_MBN, ids_MBN).token_ids()
    drafts_BK = ids_BN[:, :0] if drafts_BK is None else drafts_BK
    limits_B1 = torch.zeros_like(positions_B1) if limits_B1 is None else limits_B1
    accepted_BN, count_B1, next_B1 = sampling.accept(drafts_BK, ids_BN, limits_B1[:, 0])
    return accepted_BN, count_B1, next_B1, positions_B1 + count_B1


_ALL = (accept_drafts, append_rows, coupled_sample, gumbel_noise, prompt_attention, verify_attention, weights_above)
IN_HLO: dict[str, Callable[..., tuple[Tensor, ...]]] = {f.__name__: f for f in _ALL}
