"""Kernels as HLO operations, for builds that leave kernels out (the recipe's `without`).

Each function has the arguments of a launch, and returns its results, then the tensors that it writes. Weights of a
packed layer are not packed if one of its kernels is left out. The compiler chooses the order of sums, so a row's bits
may depend on the number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model import sampling
from model.attention import append
from model.cache import AttentionMetadata, Cache
from model.ops import Ops, first_argmax, iota, ordered_sum
from model.sampling import ShardArgmax

_LOWEST = torch.finfo(torch.float32).min
# the kernels that require packed attention weights, and those that require packed MLP weights
ATTENTION_KERNELS, MLP_KERNELS = {"decode_attention", "prompt_product", "prompt_qkv"}, {"decode_mlp", "prompt_mlp"}


def verify_attention(
    ops: Ops, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, keys: Tensor, values: Tensor, positions_BN: Tensor,
    table_BL: Tensor, limit_B1: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Appends the rows, then attends."""
    pools = append_rows(ops, k_BGND, v_BGND, keys, values, positions_BN, table_BL)
    last_BN = positions_BN if limit_B1 is None else limit_B1.expand_as(positions_BN)
    return _attend(q_BHND, pools[0], pools[1], last_BN, table_BL), *pools


def append_rows(
    ops: Ops, k_BGND: Tensor, v_BGND: Tensor, keys: Tensor, values: Tensor, positions_BN: Tensor, table_BL: Tensor
) -> tuple[Tensor, ...]:
    return append(ops, k_BGND, v_BGND, Cache(keys, values), AttentionMetadata(positions_BN, table_BL))


def prompt_attention(
    ops: Ops, q_BHND: Tensor, keys: Tensor, values: Tensor, first_B1: Tensor, table_BL: Tensor
) -> tuple[Tensor, ...]:
    return (_attend(q_BHND, keys, values, first_B1 + iota(q_BHND.shape[2], first_B1), table_BL),)


def _attend(q_BHND: Tensor, k_PGKD: Tensor, v_PGKD: Tensor, last_BN: Tensor, table_BL: Tensor) -> Tensor:
    """(B, H, N, D) attention, unscaled, over the positions up to `last_BN`: gathers the blocks, softmax at once."""
    k_BGSD, v_BGSD = (pool[table_BL].transpose(1, 2).flatten(2, 3).float() for pool in (k_PGKD, v_PGKD))
    q_BGHND = q_BHND.float().unflatten(1, (k_BGSD.shape[1], -1))
    s_BGHNS = torch.einsum("bghnd,bgsd->bghns", q_BGHND, k_BGSD)
    visible_BNS = iota(k_BGSD.shape[2], last_BN) <= last_BN[..., None]
    p_BGHNS = torch.where(visible_BNS[:, None, None], s_BGHNS, float("-inf")).softmax(-1)
    return torch.einsum("bghns,bgsd->bghnd", p_BGHNS, v_BGSD).flatten(1, 2).to(q_BHND.dtype)


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
