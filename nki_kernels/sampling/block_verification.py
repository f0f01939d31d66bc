"""Block verification: drafts are accepted as a block, the longest prefix that its joint probability allows.

rho[0] = 1,  rho[n] = min(rho[n - 1] * target(n - 1) / draft(n - 1), 1)
accepted = the largest n with u[n] * (mass[n] + 1 - rho[n]) <= mass[n], or 0;  then row n's residual draw

target(n), draft(n) are the probabilities of draft n; mass[n] = sum_i max(rho[n] target_n[i] - draft_n[i], 0) and the
draw of row n are rejection_sample.py's with weight rho. So a step is two launches of that kernel around
`block_weights_kernel`, whose rho is the second one's weight, and `accept_block_kernel`. Rows from limit[b] on have no
draft mass, hence mass rho: the bonus.

Layouts: sums (M, 3, B, N) fp32 of M <= 128 shards, rho (B, N) fp32, u (B, N) fp32, the rest as accept_rejection.py's.
Source: Sun et al., "Block verification accelerates speculative decoding", ICLR 2025 (arXiv 2403.10444).
Cost: latency is all; one scan a sequence.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.accept_drafts import finish, indices, merged, one_row
from nki_kernels.sampling.accept_rejection import added, chosen_tokens

# a draft is drawn with some probability; what rounds to none must not divide
LEAST = 1.0e-30


def totals_of(sums):
    """The sums of all shards: fp32 (1, 3, B, N)."""
    shards, _, batch, rows = sums.shape
    count = 3 * batch * rows
    return added(sums.reshape((shards, count)), count).reshape((1, 3, batch, rows))


@nki.jit
def block_weights_kernel(sums):
    """rho (B, N) fp32 from the sums of a launch with any weight: only the drafts' probabilities are read."""
    _, _, batch, rows = sums.shape
    totals = totals_of(sums)
    ratio, rho = nl.ndarray((1, batch, rows), nl.float32), nl.ndarray((1, batch, rows), nl.float32)
    most = nl.ndarray((1, rows), nl.float32)
    nisa.memset(dst=most, value=1.0)
    nisa.memset(dst=rho, value=1.0)
    nisa.tensor_scalar(dst=ratio, data=totals[:, 1], op0=nl.maximum, operand0=LEAST)
    nisa.reciprocal(dst=ratio, data=ratio)
    nisa.tensor_tensor(dst=ratio, data1=ratio, data2=totals[:, 0], op=nl.multiply)
    if rows > 1:
        for b in range(batch):
            nisa.tensor_tensor_scan(
                dst=rho[:, b, 1:rows],
                data0=ratio[:, b, 0 : rows - 1],
                data1=most[:, 1:rows],
                initial=1.0,
                op0=nl.multiply,
                op1=nl.minimum,
            )
    made = nl.ndarray((batch, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    target = made.ap([[batch * rows, 1], [1, batch * rows]], offset=0)
    nisa.dma_copy(dst=target, src=rho, dge_mode=nisa.dge_mode.none)
    return made


def accepted_count(mass, rho, u, index, limits):
    """1 + the largest row whose test passes, at most the limit: fp32 (1, B, 1)."""
    shape = index.shape
    rest, passed = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    count = nl.ndarray((1, shape[1], 1), nl.float32)
    nisa.tensor_tensor(dst=rest, data1=mass, data2=rho, op=nl.subtract)
    nisa.scalar_tensor_tensor(dst=rest, data=rest, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=u)
    nisa.tensor_tensor(dst=passed, data1=rest, data2=mass, op=nl.less_equal)
    # row 0 accepts nothing and needs no test: its index is 0
    nisa.tensor_tensor(dst=passed, data1=passed, data2=index, op=nl.multiply)
    allowed = one_row(limits, (1, shape[1], 1)).broadcast(2, shape[2])
    within = nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=within, data1=index, data2=allowed, op=nl.less_equal)
    nisa.tensor_tensor(dst=passed, data1=passed, data2=within, op=nl.multiply)
    nisa.tensor_reduce(dst=count, op=nl.maximum, data=passed, axis=2)
    nisa.tensor_scalar(dst=count, data=count, op0=nl.add, operand0=1.0)
    return count


@nki.jit
def accept_block_kernel(sums, values, ids, rho, u, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1), int32, of a launch with weight rho."""
    shards, batch, rows = values.shape
    shape, both, index = (1, batch, rows), (shards, batch * rows), indices(batch, rows)
    mass = totals_of(sums)[:, 2]
    draws = merged(values.reshape(both), ids.reshape(both), batch * rows).reshape(shape)
    count = accepted_count(mass, one_row(rho, shape), one_row(u, shape), index, limits)
    tokens = chosen_tokens(one_row(drafts, (1, batch, rows - 1)), draws, count, index)
    return finish(tokens, count, index, positions)
