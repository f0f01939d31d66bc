"""Medusa heads' weights: vLLM's names, which are ours and the bundle's too, shapes, and cuts.

Every matrix is cut by rows, so that a rank computes whole outputs.
"""

from __future__ import annotations

from model.bundle.cut import IDS, ROWS, Weight
from model.draft_config import MedusaConfig
from model.packing import Packing


def medusa_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint."""
    size, projections = config.hidden_size, 1 if config.shared_head else config.heads
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{h}.layers.{n}.weight": (size, size) for h in range(config.heads) for n in range(config.layers)
    }
    return shapes | {f"lm_heads.{h}.weight": (config.vocab_size, size) for h in range(projections)}


def medusa_table(config: MedusaConfig, _: Packing) -> list[Weight]:
    """Every weight of the heads."""
    cuts = {name: IDS if name.startswith("lm_heads.") else ROWS for name in medusa_shapes(config)}
    return [Weight(name, name, ((name, cut),)) for name, cut in cuts.items()]
