"""neuronx-cc's flags for each kind of graph: the documented defaults, or a recipe's line in their place."""

import re
from collections.abc import Mapping
from typing import Final

from model.errors import UserError
from model.nki import launches
from trnspec.bundle.manifest import PLAIN, PREFILL, STEP, with_lnc

TARGET: Final = "trn2"
# physical cores of a logical core
LNC: Final = launches.LNC
DEFAULT_FLAGS: Final = dict.fromkeys((PREFILL, STEP), with_lnc(PLAIN))
# the compilers of SDK 2.32 and 2.33 have other defaults for integers, older ones no such flag; ours are indices and
# counts, exact in 32 bits
INTEGER_FLAGS: Final = "--native-int64=disabled --implicit-integer-downcast=none"
_FIRST_WITH_INTEGER_FLAGS = (2, 27, 5334)
_LNC_FLAG = re.compile(r"(?:--lnc|-lnc|--logical-nc-config)[ =](\S+)")


def flags_of(given: Mapping[str, str], compiler: str = "") -> dict[str, str]:
    """Kind of graph -> flags for a version of neuronx-cc; a given line replaces the default one.

    Raises UserError for an unknown kind of graph, or other cores than the NKI kernels of a graph have.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", compiler)[:3])
    integers = f" {INTEGER_FLAGS}" if version >= _FIRST_WITH_INTEGER_FLAGS else ""
    for kind, line in given.items():
        if kind not in DEFAULT_FLAGS:
            raise UserError(f"compiler_flags has {kind!r}; give a line of flags for one of {', '.join(DEFAULT_FLAGS)}")
        if wrong := [cores for cores in _LNC_FLAG.findall(line) if cores != str(LNC)]:
            raise UserError(
                f"compiler_flags compiles {kind} for {wrong[0]} cores and its kernels have {LNC}, which neuronx-cc "
                f"refuses (NCC_EVRF066); write --lnc {LNC}, or leave it out"
            )
    return {kind: given.get(kind, f"{line}{integers}") for kind, line in DEFAULT_FLAGS.items()}
