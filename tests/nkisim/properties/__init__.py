"""Every function against an independent reading of the manual, over drawn shapes, dtypes and places."""

from tests.nkisim.properties import test_collectives as test_collectives
from tests.nkisim.properties import test_copies as test_copies
from tests.nkisim.properties import test_cores as test_cores
from tests.nkisim.properties import test_gpsimd as test_gpsimd
from tests.nkisim.properties import test_language as test_language
from tests.nkisim.properties import test_matmul_dma as test_matmul_dma
from tests.nkisim.properties import test_scalar as test_scalar
from tests.nkisim.properties import test_search as test_search
from tests.nkisim.properties import test_vector as test_vector
