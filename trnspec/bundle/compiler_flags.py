"""neuronx-cc's default flags, and the two kinds of graph that a manifest lists flags for."""

from typing import Final

from model.graph_key import GraphKey
from model.nki.launches import LNC

PREFILL, STEP = "prefill", "step"
# source: compiler/neuronx-cc/api-reference-guide of SDK 2.32, where -O2 is the default
PLAIN: Final = "--model-type transformer --auto-cast none -O2"


def flag_tag(key: GraphKey) -> str:
    """The kind of graph, by which a manifest lists flags."""
    return PREFILL if key.is_prefill else STEP


def with_lnc(flags: str, lnc: int | str = LNC) -> str:
    """The flags with the cores of a logical core, where they do not say it."""
    return flags if "--lnc" in flags or "--logical-nc-config" in flags else f"{flags} --lnc {lnc}"
