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
from nki_kernels.sampling.accept_rejection import chosen_tokens, totals_of
from nki_kernels.tiles import move

# a draft is drawn with some probability; what rounds to none must not divide
LEAST = 1.0e-30


@nki.jit
def block_weights_kernel(sums):
    """rho (B, N) fp32 from the sums of a launch with any weight: only the drafts' probabilities are read."""
    _, _, batch, candidates = sums.shape
    totals_13BN, shape = totals_of(sums), (1, batch, candidates)
    ratio_1BN, rho_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    most_1N = nl.ndarray((1, candidates), nl.float32)
    nisa.memset(dst=most_1N, value=1.0)
    nisa.memset(dst=rho_1BN, value=1.0)
    nisa.tensor_scalar(dst=ratio_1BN, data=totals_13BN[:, 1], op0=nl.maximum, operand0=LEAST)
    nisa.reciprocal(dst=ratio_1BN, data=ratio_1BN)
    nisa.tensor_tensor(dst=ratio_1BN, data1=ratio_1BN, data2=totals_13BN[:, 0], op=nl.multiply)
    if candidates > 1:
        for b in range(batch):
            nisa.tensor_tensor_scan(
                dst=rho_1BN[:, b, 1:candidates],
                data0=ratio_1BN[:, b, 0 : candidates - 1],
                data1=most_1N[:, 1:candidates],
                initial=1.0,
                op0=nl.multiply,
                op1=nl.minimum,
            )
    out_BN = nl.ndarray((batch, candidates), dtype=nl.float32, buffer=nl.shared_hbm)
    move(out_BN.ap([[batch * candidates, 1], [1, batch * candidates]], offset=0), rho_1BN)
    return out_BN


def accepted_count(mass_1BN, rho_1BN, u_1BN, index_1BN, limits):
    """1 + the largest row whose test passes, at most the limit: fp32 (1, B, 1)."""
    shape = index_1BN.shape
    least_1BN, passed_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    count_1B1 = nl.ndarray((1, shape[1], 1), nl.float32)
    nisa.tensor_tensor(dst=least_1BN, data1=mass_1BN, data2=rho_1BN, op=nl.subtract)
    nisa.scalar_tensor_tensor(dst=least_1BN, data=least_1BN, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=u_1BN)
    nisa.tensor_tensor(dst=passed_1BN, data1=least_1BN, data2=mass_1BN, op=nl.less_equal)
    # row 0 accepts nothing and needs no test: its index is 0
    nisa.tensor_tensor(dst=passed_1BN, data1=passed_1BN, data2=index_1BN, op=nl.multiply)
    limit_1BN = one_row(limits, (1, shape[1], 1)).broadcast(2, shape[2])
    within_1BN = nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=within_1BN, data1=index_1BN, data2=limit_1BN, op=nl.less_equal)
    nisa.tensor_tensor(dst=passed_1BN, data1=passed_1BN, data2=within_1BN, op=nl.multiply)
    nisa.tensor_reduce(dst=count_1B1, op=nl.maximum, data=passed_1BN, axis=2)
    nisa.tensor_scalar(dst=count_1B1, data=count_1B1, op0=nl.add, operand0=1.0)
    return count_1B1


@nki.jit
def accept_block_kernel(sums, values, ids, rho, u, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1), int32, of a launch with weight rho."""
    shards, batch, candidates = values.shape
    rows, index_1BN = batch * candidates, indices(batch, candidates)
    shape, both = (1, batch, candidates), (shards, rows)
    mass_1BN = totals_of(sums)[:, 2]
    draws_1BN = merged(values.reshape(both), ids.reshape(both), rows).reshape(shape)
    count_1B1 = accepted_count(mass_1BN, one_row(rho, shape), one_row(u, shape), index_1BN, limits)
    tokens_1BN = chosen_tokens(one_row(drafts, (1, batch, candidates - 1)), draws_1BN, count_1B1, index_1BN)
    return finish(tokens_1BN, count_1B1, index_1BN, positions)
