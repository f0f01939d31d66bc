"""Matrix product: tiles of 128 x 128 x 512, accumulated over K in PSUM."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def matmul(a_t, b, width=512):
    """a @ b in b's dtype, fp32 accumulation; a_t (K, M) is a transposed, b is (K, N).

    K and M are multiples of 128, N of `width`, the columns of a product (at most 512, a PSUM bank of fp32).
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    tiles = depth // P
    out = nl.ndarray((rows, columns), dtype=b.dtype, buffer=nl.shared_hbm)
    for row in range(rows // P):
        a_PKM = nl.ndarray((P, tiles, P), dtype=a_t.dtype)
        for k in range(tiles):
            nisa.dma_copy(dst=a_PKM[:, k, :], src=a_t[nl.ds(k * P, P), nl.ds(row * P, P)])
        for column in range(columns // width):
            b_PKN = nl.ndarray((P, tiles, width), dtype=b.dtype)
            for k in range(tiles):
                nisa.dma_copy(dst=b_PKN[:, k, :], src=b[nl.ds(k * P, P), nl.ds(column * width, width)])
            sum_MN = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
            for k in range(tiles):
                nisa.nc_matmul(dst=sum_MN, stationary=a_PKM[:, k, :], moving=b_PKN[:, k, :], accumulate=k > 0)
            out_MN = nl.ndarray((P, width), dtype=b.dtype)
            nisa.tensor_copy(dst=out_MN, src=sum_MN)
            nisa.dma_copy(dst=out[nl.ds(row * P, P), nl.ds(column * width, width)], src=out_MN)
    return out
