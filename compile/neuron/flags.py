"""The compiler's flags for each tag, as NxDI emits them, and the flags that override them.

Recorded literally in the manifest: two bundles compiled with other flags are two bundles.
"""

from __future__ import annotations

import json

from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.errors import UserError

TARGET = "trn2"
# logical cores of two physical ones; must be neuron_config.json's logical_nc_config
LNC = 2
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
DEFAULT_FLAGS = {PREFILL: _PROMPT, FUSED: _DECODING, DECODE: _DECODING}


def flags_of(given: str) -> dict[str, str]:
    """Flags by tag: the defaults, or `given`: one line for every tag, or a JSON object of tag and line."""
    if not given.lstrip().startswith("{"):
        return dict.fromkeys(DEFAULT_FLAGS, given) if given else dict(DEFAULT_FLAGS)
    try:
        named = json.loads(given)
    except ValueError as error:
        raise UserError(f"--compiler-flags is no JSON object ({error}); give a line or {{tag: line}}") from error
    for tag, line in named.items():
        if tag not in DEFAULT_FLAGS or not isinstance(line, str):
            raise UserError(
                f"--compiler-flags has {tag!r}: {line!r}; give a line of flags for one of {', '.join(DEFAULT_FLAGS)}"
            )
    return DEFAULT_FLAGS | named
