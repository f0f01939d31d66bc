"""Every example, compared with its formula in NumPy by nkisim's pytest plugin."""

import numpy as np
import pytest

from all_reduce import row_parallel
from autotune import main
from matmul import matmul
from nkisim.ranks import simulate_ranks
from paged_gather import paged_gather
from rms_norm import rms_norm
from two_cores import column_sums


@pytest.mark.nki_latency(max_us=60)
def test_matmul(nki_kernel):
    def formula(a_t, b):
        return (a_t.astype(np.float64).T @ b.astype(np.float64)).astype(b.dtype)

    shapes = ["bfloat16:256x128", "bfloat16:256x1024"]
    nki_kernel.check(matmul, formula, shapes, hostile=["large", "zeros"], rtol=2**-8, of_largest=2**-12)


@pytest.mark.nki_latency(max_us=40)
def test_rms_norm(nki_kernel):
    def formula(x, weight):
        wide = x.astype(np.float64)
        return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight.astype(np.float64)

    odd = [["float32:1x7", "float32:1x7"], ["float32:130x33", "float32:1x33"]]
    # not "large": the squares overflow in fp32
    hostile = ["tiny", "nan", "equal"]
    nki_kernel.check(rms_norm, formula, ["float32:256x1024", "float32:1x1024"], odd=odd, hostile=hostile, rtol=1e-5)


def test_paged_gather(nki_kernel):
    table = np.random.default_rng(1).permutation(64)[:40].astype(np.int32).reshape(40, 1)
    nki_kernel.check(paged_gather, lambda pages, table: pages[table[:, 0]], ["bfloat16:64x2048", table])


def test_two_cores(nki_kernel):
    def formula(x):
        return x.astype(np.float64).sum(axis=0, keepdims=True)

    nki_kernel.check(column_sums, formula, ["float32:256x512"], hostile=["nan"], of_largest=1e-6, lnc=2)


def test_all_reduce():
    ranks, draw = 4, np.random.default_rng(2).standard_normal
    x_t, weight = draw((ranks, 256, 16)).astype(np.float32), draw((ranks, 256, 64)).astype(np.float32)
    outputs = simulate_ranks(row_parallel, ranks)([(x_t[r], weight[r], ranks) for r in range(ranks)])
    expected = np.einsum("rkm,rkn->mn", x_t.astype(np.float64), weight.astype(np.float64))
    for output in outputs:
        assert np.array_equal(output, outputs[0])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-4)


def test_autotune(capsys):
    main()
    assert capsys.readouterr().out.splitlines()[-1] == "fastest: width 512"
