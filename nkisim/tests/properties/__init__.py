"""Every function against an independent reading of the manual, over random shapes, dtypes and places."""

from properties import test_collectives as test_collectives
from properties import test_copies as test_copies
from properties import test_cores as test_cores
from properties import test_gpsimd as test_gpsimd
from properties import test_language as test_language
from properties import test_matmul_dma as test_matmul_dma
from properties import test_scalar as test_scalar
from properties import test_search as test_search
from properties import test_vector as test_vector
