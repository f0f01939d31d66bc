"""The rejection rule: which drafts are accepted, and the token that follows them.

draft n is accepted while u[n] * draft(n) < target(n);  the first that is not gives way to its row's residual draw,
and when all are accepted the last row's draw, the bonus, follows

target(n), draft(n) are the probabilities of draft n, the draw of row n is rejection_sample.py's. A row without any
residual mass accepts: its distributions differ by rounding alone, so that the draft is the target's own draw.
At most limit[b] drafts are accepted; the caller gives the rows from limit[b] on no draft mass.

Layouts: sums (M, 3, B, N) and values (M, B, N) fp32, ids (M, B, N) int32 of M <= 128 shards in ascending order of
ids; u (B, N) fp32, drafts (B, N - 1), positions and limits (B, 1) int32; outputs as accept_drafts.py's.
Sources: Leviathan, Kalman, Matias, ICML 2023; Chen et al., arXiv 2302.01318. Cost: latency is all.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.accept_drafts import emitted_count, finish, indices, merged, one_row, turned
from nki_kernels.tiles import P


def added(source, rows):
    """The sums over shards, in ascending order, from (M, R): fp32 (1, R)."""
    totals_1R = nl.ndarray((1, rows), dtype=nl.float32)
    for first in range(0, rows, P):
        count = min(P, rows - first)
        total_R1 = nl.ndarray((count, 1), nl.float32)
        total_psum_1R = nl.ndarray((1, count), nl.float32, buffer=nl.psum)
        nisa.tensor_reduce(dst=total_R1, op=nl.add, data=turned(source, first, count), axis=1)
        nisa.nc_transpose(dst=total_psum_1R, data=total_R1)
        nisa.tensor_copy(dst=totals_1R[:, first : first + count], src=total_psum_1R)
    return totals_1R


def totals_of(sums):
    """The sums (M, 3, B, N) of all shards: fp32 (1, 3, B, N)."""
    shards, _, batch, candidates = sums.shape
    count = 3 * batch * candidates
    return added(sums.reshape((shards, count)), count).reshape((1, 3, batch, candidates))


def passes(totals_13BN, u_1BN):
    """1 where a draft is accepted, else 0: fp32 (1, B, N)."""
    shape = u_1BN.shape
    least_1BN, passed_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    empty_1BN = nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=least_1BN, data1=u_1BN, data2=totals_13BN[:, 1], op=nl.multiply)
    nisa.tensor_tensor(dst=passed_1BN, data1=least_1BN, data2=totals_13BN[:, 0], op=nl.less)
    nisa.tensor_scalar(dst=empty_1BN, data=totals_13BN[:, 2], op0=nl.less_equal, operand0=0.0)
    nisa.tensor_tensor(dst=passed_1BN, data1=passed_1BN, data2=empty_1BN, op=nl.maximum)
    return passed_1BN


def chosen_tokens(drafts_1BK, draws_1BN, count_1B1, index_1BN):
    """Drafts before the last emitted row, the row's draw there: fp32 (1, B, N)."""
    shape, k = drafts_1BK.shape, drafts_1BK.shape[2]
    early_1BK, tokens_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(draws_1BN.shape, nl.float32)
    nisa.scalar_tensor_tensor(
        dst=early_1BK,
        data=index_1BN[:, :, 0:k],
        op0=nl.add,
        operand0=1.0,
        op1=nl.less,
        operand1=count_1B1.broadcast(2, k),
    )
    change_1BK = nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=change_1BK, data1=drafts_1BK, data2=draws_1BN[:, :, 0:k], op=nl.subtract)
    nisa.tensor_tensor(dst=change_1BK, data1=change_1BK, data2=early_1BK, op=nl.multiply)
    nisa.tensor_copy(dst=tokens_1BN, src=draws_1BN)
    nisa.tensor_tensor(dst=tokens_1BN[:, :, 0:k], data1=tokens_1BN[:, :, 0:k], data2=change_1BK, op=nl.add)
    return tokens_1BN


@nki.jit
def accept_rejection_kernel(sums, values, ids, u, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1), all int32."""
    shards, batch, candidates = values.shape
    rows, index_1BN = batch * candidates, indices(batch, candidates)
    shape, both = (1, batch, candidates), (shards, rows)
    totals_13BN = totals_of(sums)
    draws_1BN = merged(values.reshape(both), ids.reshape(both), rows).reshape(shape)
    passed_1BN = passes(totals_13BN, one_row(u, shape))
    count_1B1 = emitted_count(passed_1BN[:, :, 0 : candidates - 1], index_1BN, limits)
    tokens_1BN = chosen_tokens(one_row(drafts, (1, batch, candidates - 1)), draws_1BN, count_1B1, index_1BN)
    return finish(tokens_1BN, count_1B1, index_1BN, positions)
