"""Reference rejection sampling: the classic rule, for those who want its higher acceptance.

Draft n is accepted while u * draft(n) < target(n); the first that is not gives way to a draw from the residual
max(target - draft, 0), and when all are accepted a bonus is drawn from the target. The emitted text has the target's
distribution, but it depends on the draft and on k, unlike that of coupled sampling. Sources: Leviathan, Kalman,
Matias, ICML 2023; Chen et al., arXiv 2302.01318. Uniforms and residual noise have domains of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops import Ops, first_argmax
from model.sampling import Sampling, filtered, gumbel, uniform

ACCEPT_DOMAIN, RESIDUAL_DOMAIN = 1, 2
# a bias that leaves a row no mass
NOTHING = -1e30


class Drafted(NamedTuple):
    """Drafts (B, k), the logits (B, k, V) that they were drawn from, and the most to accept (B,)."""

    ids_BK: Tensor
    logits_BKV: Tensor
    limit_B: Tensor


def rejection_sample(
    ops: Ops, target_BNV: Tensor, drafted: Drafted, sampling: Sampling, positions_B1: Tensor
) -> tuple[Tensor, Tensor]:
    """The emitted ids (B, N) padded with -1, and their counts (B, 1).

    Temperatures are above 0; positions_B1 is the absolute position of the first token to emit.
    """
    batch, count, vocabulary = target_BNV.shape
    k, index_N = count - 1, torch.arange(count, dtype=torch.int32, device=target_BNV.device)
    limit_B1 = drafted.limit_B.clamp(max=k)[:, None]
    target = _probabilities(ops, target_BNV, sampling)
    draft = torch.nn.functional.pad(_probabilities(ops, drafted.logits_BKV, sampling), (0, 0, 0, 1))
    # the row of the bonus, and those from the limit on, have no draft: their residual is the target
    draft = torch.where((index_N < limit_B1)[..., None], draft, 0.0)
    rows, positions_R = sampling.rows(count), (positions_B1 + index_N).flatten()
    u_BN = uniform(rows.seed_R2, positions_R, 1, ACCEPT_DOMAIN).reshape(batch, count)
    residual = (target - draft).clamp(min=0)
    at = torch.nn.functional.pad(drafted.ids_BK, (0, 1)).long()[..., None]
    p_BN, q_BN = (x.gather(-1, at)[..., 0] for x in (target, draft))
    # without residual mass the two differ by rounding alone, and the draft is the target's own draw
    passed_BN = (u_BN * q_BN < p_BN) | (residual.sum(-1) <= 0)
    first_B1 = torch.where(passed_BN & (index_N < k), k, index_N).amin(-1, keepdim=True)
    count_B1 = torch.minimum(first_B1, limit_B1).to(torch.int32) + 1
    noise = gumbel(rows.seed_R2, positions_R, vocabulary, RESIDUAL_DOMAIN)
    drawn_BN = first_argmax(residual.flatten(0, 1) * torch.exp(noise)).reshape(batch, count)
    tokens_BN = torch.where(index_N < count_B1 - 1, torch.nn.functional.pad(drafted.ids_BK, (0, 1)), drawn_BN)
    return torch.where(index_N < count_B1, tokens_BN, -1), count_B1


def _probabilities(ops: Ops, logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    rows = sampling.rows(logits_BNV.shape[1])
    scaled = logits_BNV.flatten(0, 1) / rows.temperature_R[:, None]
    kept = filtered(ops, scaled - scaled.amax(-1, keepdim=True), rows)
    return torch.softmax(kept, -1).reshape(logits_BNV.shape)
