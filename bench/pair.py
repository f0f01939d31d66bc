"""The bundle of a pair: what every comparison with and without speculation needs."""

from __future__ import annotations

from pathlib import Path

from model.bundle.manifest import Bundle
from model.bundle.opening import open_bundle
from model.errors import UserError


def read_pair(folder: Path) -> Bundle:
    """A bundle with a draft; UserError for a target alone, which would be compared with itself."""
    bundle = open_bundle(folder)
    if not bundle["k"]:
        raise UserError(f"{folder} is a target alone (k 0), with nothing to compare; give the bundle of a pair")
    return bundle
