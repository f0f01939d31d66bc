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

from nki_kernels.sampling.accept_drafts import P, emitted_count, finish, indices, merged, one_row, turned


def added(source, rows):
    """The sums over shards, in ascending order, from (M, R): fp32 (1, R)."""
    made = nl.ndarray((1, rows), dtype=nl.float32)
    for first in range(0, rows, P):
        count = min(P, rows - first)
        total, row = nl.ndarray((count, 1), nl.float32), nl.ndarray((1, count), nl.float32, buffer=nl.psum)
        nisa.tensor_reduce(dst=total, op=nl.add, data=turned(source, first, count), axis=1)
        nisa.nc_transpose(dst=row, data=total)
        nisa.tensor_copy(dst=made[:, first : first + count], src=row)
    return made


def passes(totals, u, shape):
    """1 where a draft is accepted, else 0, from the sums (1, 3, B, N): fp32 (1, B, N)."""
    least, made, empty = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=least, data1=u, data2=totals[:, 1], op=nl.multiply)
    nisa.tensor_tensor(dst=made, data1=least, data2=totals[:, 0], op=nl.less)
    nisa.tensor_scalar(dst=empty, data=totals[:, 2], op0=nl.less_equal, operand0=0.0)
    nisa.tensor_tensor(dst=made, data1=made, data2=empty, op=nl.maximum)
    return made


def chosen_tokens(drafts, draws, count, index):
    """Drafts before the last emitted row, the row's draw there: fp32 (1, B, N)."""
    batch, k = drafts.shape[1], drafts.shape[2]
    early, made = nl.ndarray((1, batch, k), nl.float32), nl.ndarray(draws.shape, nl.float32)
    spread = count.broadcast(2, k)
    nisa.scalar_tensor_tensor(dst=early, data=index[:, :, 0:k], op0=nl.add, operand0=1.0, op1=nl.less, operand1=spread)
    change = nl.ndarray((1, batch, k), nl.float32)
    nisa.tensor_tensor(dst=change, data1=drafts, data2=draws[:, :, 0:k], op=nl.subtract)
    nisa.tensor_tensor(dst=change, data1=change, data2=early, op=nl.multiply)
    nisa.tensor_copy(dst=made, src=draws)
    nisa.tensor_tensor(dst=made[:, :, 0:k], data1=made[:, :, 0:k], data2=change, op=nl.add)
    return made


@nki.jit
def accept_rejection_kernel(sums, values, ids, u, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1), all int32."""
    shards, batch, rows = values.shape
    shape, both, index = (1, batch, rows), (shards, batch * rows), indices(batch, rows)
    totals = added(sums.reshape((shards, 3 * batch * rows)), 3 * batch * rows).reshape((1, 3, batch, rows))
    draws = merged(values.reshape(both), ids.reshape(both), batch * rows).reshape(shape)
    passed = passes(totals, one_row(u, shape), shape)
    count = emitted_count(passed[:, :, 0 : rows - 1], index, limits)
    tokens = chosen_tokens(one_row(drafts, (1, batch, rows - 1)), draws, count, index)
    return finish(tokens, count, index, positions)
