"""Which library multiplies on a CPU, so that a row of a product has the same bits whatever stands beside it.

XLA's products on x86 are oneDNN's. With AVX-512 a row has one value. Without it oneDNN sums the last one to three of
some rows in another order than the rest, so YNNPACK multiplies there, held to consistent arithmetic: a number is a
chain of fused multiplications along the summed axis, cut in the same places for any number of rows. So it is for
weights (outputs, inputs), as a checkpoint has them; with inputs first it cuts the sums of few rows where it cuts none
of many. What YNNPACK leaves is oneDNN's, held to SSE4.1, where a row has one value at half the speed.
"""

from __future__ import annotations

import os

from trnspec.runtime.processor import processor_flags

ONEDNN_VARIABLE = "DNNL_MAX_CPU_ISA"
_FLAGS = processor_flags()
# what oneDNN reads before its first product
EARLY = {ONEDNN_VARIABLE: "SSE41"} if _FLAGS and "avx512bw" not in _FLAGS else {}
HELD_BACK = bool(EARLY) or ONEDNN_VARIABLE in os.environ
BY_YNNPACK = bool(EARLY) and "fma" in _FLAGS
OPTIONS: dict[str, bool | str] = {"xla_cpu_experimental_ynn_fusion_type": ""}
if BY_YNNPACK:
    OPTIONS = {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        # consistent arithmetic
        "xla_cpu_enable_platform_dependent_math": False,
    }
