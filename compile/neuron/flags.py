"""NxDI's tags of graphs, and the compiler's flags for each: documented ones, or a recipe's.

The flags are part of a bundle's identity: its manifest records them literally. A line of a recipe takes the place of
the default one whole; `nxdi` means the lines that NxDI gives, with options that no document describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.nki import launches
from trnspec.bundle.compiler_flags import DECODE, FUSED, PLAIN, PREFILL, with_lnc

if TYPE_CHECKING:
    from trnspec.bundle.spec import BundleSpec

TARGET, NXDI = "trn2", "nxdi"
# logical cores of two physical ones; neuron_config.json's logical_nc_config
LNC: Final = launches.LNC
# source: NxDI 0.9, models/model_wrapper.py, as it prints them for these tags without kernels switched on, blank for
# blank
_ALL = "--auto-cast=none --model-type=transformer  "
_OVERLAP = (
    "--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={} --vectorize-strided-dma ' "
)
_DECODING = f"{_ALL}{_OVERLAP.format(1)}--lnc={LNC} -O2  --internal-hlo2tensorizer-options='--verify-hlo=true' "
_PROMPT = (
    f"{_ALL}{_OVERLAP.format(2)}--lnc={LNC} -O1  "
    "--internal-hlo2tensorizer-options=' --modular-flow-mac-threshold=10  --verify-hlo=true' "
)
NXDI_FLAGS = {PREFILL: _PROMPT, FUSED: _DECODING, DECODE: _DECODING}
DEFAULT_FLAGS = dict.fromkeys(NXDI_FLAGS, with_lnc(PLAIN))
# rules for integers, which differ between the compilers of 2.32 and 2.33 by default; those before know no such flag.
# ours are indices and counts, exact in 32 bits, and no product, sum of ranks or scatter computes with them
INTEGER_FLAGS = "--native-int64=disabled --implicit-integer-downcast=none"
_HAVE_INTEGER_FLAGS = (2, 27, 5334)
_LNC_FLAG = re.compile(r"(?:--lnc|-lnc|--logical-nc-config)[ =](\S+)")


def nxdi_tag(key: GraphKey, spec: BundleSpec) -> str:
    """NxDI's tag of a graph; "" for one that NxDI does not have.

    NxDI's host fills prompts up to a bucket, runs one k, always filters and asks nothing more.
    """
    if key.asking or not key.filters or key.bucket not in spec.buckets:
        return ""
    if key.stage is Stage.PREFILL:
        return PREFILL if key.rows == key.bucket else ""
    if key.stage is not Stage.STEP or key.k not in (0, spec.k):
        return ""
    return FUSED if key.k else DECODE


def flags_of(given: Mapping[str, str], compiler: str = "") -> dict[str, str]:
    """Flags by tag for a version of the compiler: the defaults, and those that are given instead.

    UserError for a tag that does not exist, and for another number of cores than the kernels of a graph have.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", compiler)[:3])
    rules = f" {INTEGER_FLAGS}" if version >= _HAVE_INTEGER_FLAGS else ""
    for tag, line in given.items():
        if tag not in DEFAULT_FLAGS:
            raise UserError(f"compiler_flags has {tag!r}; give a line of flags for one of {', '.join(DEFAULT_FLAGS)}")
        if wrong := [cores for cores in _LNC_FLAG.findall(line) if cores != str(LNC)]:
            raise UserError(
                f"compiler_flags compiles {tag} for {wrong[0]} cores and its kernels have {LNC}, which the compiler "
                f"refuses (NCC_EVRF066); write --lnc {LNC}, or leave it out"
            )
    return {
        tag: NXDI_FLAGS[tag] if given.get(tag) == NXDI else given.get(tag, f"{line}{rules}")
        for tag, line in DEFAULT_FLAGS.items()
    }
