"""Every function against an independent reading of the manual, over random shapes, dtypes and places."""

from nkisim.tests.properties import test_collectives as test_collectives
from nkisim.tests.properties import test_copies as test_copies
from nkisim.tests.properties import test_cores as test_cores
from nkisim.tests.properties import test_gpsimd as test_gpsimd
from nkisim.tests.properties import test_language as test_language
from nkisim.tests.properties import test_matmul_dma as test_matmul_dma
from nkisim.tests.properties import test_scalar as test_scalar
from nkisim.tests.properties import test_search as test_search
from nkisim.tests.properties import test_vector as test_vector
