"""The tags by which a manifest lists neuronx-cc's flags, NxDI's words, and the flags of a graph that has none."""

from __future__ import annotations

from typing import Final

from model.graph_key import GraphKey
from model.nki.launches import LNC

PREFILL, FUSED, DECODE = "context_encoding_model", "fused_speculation_model", "token_generation_model"
# source: compiler/neuronx-cc/api-reference-guide of SDK 2.32, where -O2 is the default
PLAIN: Final = "--model-type transformer --auto-cast none -O2"


def flag_tag(key: GraphKey) -> str:
    """The tag whose flags a graph is compiled with, also where NxDI does not have it."""
    return PREFILL if key.is_prefill else FUSED if key.k else DECODE


def with_lnc(flags: str, lnc: int | str = LNC) -> str:
    """The flags with the cores of a logical core, where they do not say it."""
    return flags if "--lnc" in flags or "--logical-nc-config" in flags else f"{flags} --lnc {lnc}"
