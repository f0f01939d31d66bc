"""NxDI's tags of graphs, and the compiler's flags for each, as NxDI emits them and as a recipe overrides them.

The flags are part of a bundle's identity: its manifest records them literally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from model.errors import UserError
from model.graph_key import GraphKey, Stage

if TYPE_CHECKING:
    from model.bundle.spec import BundleSpec

PREFILL, FUSED, DECODE = "context_encoding_model", "fused_speculation_model", "token_generation_model"
TARGET = "trn2"
# logical cores of two physical ones; must be neuron_config.json's logical_nc_config
LNC: Final = 2
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


def nxdi_tag(key: GraphKey, spec: BundleSpec) -> str:
    """NxDI's tag of a graph; "" for one that NxDI does not have.

    NxDI's host fills prompts up to a bucket, runs one k, always filters and asks nothing more.
    """
    if key.asking or not key.filters or key.bucket not in spec.buckets:
        return ""
    if key.is_prefill:
        return PREFILL if key.rows == key.bucket else ""
    if key.stage is not Stage.STEP or key.k not in (0, spec.k):
        return ""
    return FUSED if key.k else DECODE


def flag_tag(key: GraphKey) -> str:
    """The tag whose flags a graph is compiled with, also where NxDI does not have it."""
    return PREFILL if key.is_prefill else FUSED if key.k else DECODE


def flags_of(given: Mapping[str, str]) -> dict[str, str]:
    """Flags by tag: the defaults, and those that are given instead. UserError for a tag that does not exist."""
    for tag in given:
        if tag not in DEFAULT_FLAGS:
            raise UserError(f"compiler_flags has {tag!r}; give a line of flags for one of {', '.join(DEFAULT_FLAGS)}")
    return DEFAULT_FLAGS | dict(given)
