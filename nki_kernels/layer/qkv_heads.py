"""The heads of packed QKV, transposed: values times 1 / rms of their row; keys and queries, normalized and rotated.

The product is of gamma * x: the row's 1 / rms is left out, and cancels in a head's norm. Decode and prefill run it.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import FP32, check, check_packed, refuse
from nki_kernels.layer.qk_norm_rope import NormAndRotate
from nki_kernels.layer.weight_stream import WeightStationary, accumulate
from nki_kernels.tiles import BANK, P, dma_static


class QKVHeads(nl.NKIObject):
    """The heads of packed QKV (blocks, E, C) in the order v, k, q; `norms` are HeadNorms of keys and queries."""

    def __init__(self, weight, dim, kv_heads, norms, rotary):
        self.weight = weight
        self.dim = dim
        self.kv_heads = kv_heads
        self.norms = norms
        self.rotary = rotary
        self.per_block = weight.columns // dim

    def project(self, block, rows, stream, heads_DHR):
        """Compute the heads of a block of RMSNormRows: (D, heads of a block, R)."""
        product = WeightStationary(rows.scaled_PTR, self.dim, self.per_block, False)
        accumulate(stream, self.weight, [product])
        for step in self.begin(block, 0, product, rows, heads_DHR, nisa.engine.vector):
            step.sum()
            step.rotate()
            step.root(rows.eps_scaled())
            step.store()

    def begin(self, block, start, product, rows, heads_DHR, engine):
        """Store the values among a product's heads, those from `start` on of a block; NormAndRotate of the others.

        `engine` copies those out of PSUM.
        """
        count, first, steps = len(product.psum), block * self.per_block + start, []
        values = min(max(self.kv_heads - first, 0), count)
        for i in range(values):
            inv_rms_PR = rows.inv_rms_all_partitions()
            self.store_values(heads_DHR[:, i, :], product.psum[i][:, 0, :], inv_rms_PR, block, start + i)
        # the sums of squares of one step are in one PSUM bank
        each = max(1, BANK // heads_DHR.shape[2])
        for low in range(values, count, each):
            psum, scales, high = [], [], min(low + each, count)
            for i in range(low, high):
                psum.append(product.psum[i][:, 0, :])
                if self.weight.is_fp8():
                    scales.append(self.weight.channels.of_group(block, start + i))
            steps.append(NormAndRotate(psum, scales, self.spans(first, low, high, heads_DHR), self.rotary, engine))
        return steps

    def store_values(self, target, psum_DR, inv_rms_PR, block, i):
        """Values of head `i` of a block: the product, times its scale if any, times 1 / rms."""
        if self.weight.is_fp8():
            scale_D1 = self.weight.channels.of_group(block, i)
            nisa.scalar_tensor_tensor(
                dst=target, data=psum_DR, op0=nl.multiply, operand0=scale_D1, op1=nl.multiply, operand1=inv_rms_PR
            )
        else:
            nisa.tensor_tensor(dst=target, data1=psum_DR, data2=inv_rms_PR, op=nl.multiply)

    def spans(self, first, start, stop, heads_DHR):
        """The spans of heads `start` to `stop` of those from head `first` on, keys and queries."""
        middle, spans = min(max(2 * self.kv_heads - first, start), stop), []
        for span in ((start, middle, self.norms[0]), (middle, stop, self.norms[1])):
            if span[0] < span[1]:
                spans.append((span[0] - start, span[1] - start, span[2], heads_DHR[:, span[0] : span[1], :]))
        return spans


def check_heads(hidden, kv_heads, norms, qkv, angles, shape):
    """The number H of query heads of packed QKV; refuse head norms, weights and angles that do not fit (B, N)."""
    for name, norm in (("k_norm", norms[0]), ("q_norm", norms[1])):
        check(name, norm, (P,), remedy="pass one weight per head dimension")
    check_packed("qkv", qkv, hidden, None, "pack_qkv")
    heads = qkv.shape[0] * qkv.shape[2] // P - 2 * kv_heads
    refuse(
        kv_heads < 1 or heads < 1 or heads % kv_heads > 0 or qkv.shape[2] % P > 0,
        f"qkv is {tuple(qkv.shape)} for {kv_heads} kv heads of {P}: make it with pack_qkv",
    )
    for name, table in (("cos", angles[0]), ("sin", angles[1])):
        check(name, table, (*shape, P // 2), FP32, "make it with law.rope_tables")
    return heads


class HeadsInHBM(nl.NKIObject):
    """The results in HBM: v, k (B, G, N, D) and q (B, H, N, D)."""

    def __init__(self, shape, kv_heads, heads, dtype):
        batch, count, dim = shape
        self.count = count
        self.tensors = []
        # the first head of each tensor, and the end
        self.firsts = (0, kv_heads, 2 * kv_heads, 2 * kv_heads + heads)
        for number in (kv_heads, kv_heads, heads):
            shape = (batch, number, count, dim)
            self.tensors.append(nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm))

    def store(self, rows_RHD, row, head):
        """Store the heads from `head` on of the rows from `row` on, a transfer for each tensor and sequence."""
        rows, heads, dim = rows_RHD.shape
        for i in range(len(self.tensors)):
            start, stop = max(head, self.firsts[i]), min(head + heads, self.firsts[i + 1])
            in_tensor, done = self.firsts[i + 1] - self.firsts[i], 0
            while done < rows and start < stop:
                sequence, n = (row + done) // self.count, (row + done) % self.count
                size = min(rows - done, self.count - n)
                offset = ((sequence * in_tensor + start - self.firsts[i]) * self.count + n) * dim
                pattern = [[dim, size], [self.count * dim, stop - start], [1, dim]]
                source = rows_RHD[done : done + size, start - head : stop - head, :]
                dma_static(self.tensors[i].ap(pattern, offset=offset), source)
                done = done + size


def rows_of(heads_DHR):
    """Transposed heads as rows: (R, heads, D)."""
    dim, heads, rows = heads_DHR.shape
    psum_RHD = nl.ndarray((rows, heads, dim), dtype=heads_DHR.dtype, buffer=nl.psum)
    rows_RHD = nl.ndarray((rows, heads, dim), dtype=heads_DHR.dtype)
    for i in range(heads):
        nisa.nc_transpose(dst=psum_RHD[:, i, :], data=heads_DHR[:, i, :])
    nisa.tensor_copy(dst=rows_RHD, src=psum_RHD, engine=nisa.engine.scalar)
    return rows_RHD
