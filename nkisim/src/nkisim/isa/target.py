"""Which NeuronCore is simulated."""

from __future__ import annotations

import os

from nkisim.enums import nc_version
from nkisim.errors import BadLaunch, NotSimulated

_NAMES = {"trn1": 2, "inf2": 2, "gen2": 2, "trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}


def get_nc_version() -> nc_version:
    """Return the target of NEURON_PLATFORM_TARGET_OVERRIDE, trn2 when it is unset.

    The official simulator falls back to trn3; this one simulates trn2 only.

    Raises:
        BadLaunch: the name is unknown.
        NotSimulated: the target is not trn2.
    """
    name = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    generation = _NAMES.get(name)
    if generation is None:
        allowed = f"it can be {', '.join(_NAMES)}"
        raise BadLaunch("NEURON_PLATFORM_TARGET_OVERRIDE", None, f"is {name!r}", allowed)
    if generation != nc_version.gen3.value:
        raise NotSimulated("target", name, "only trn2 (NeuronCore-v3) is simulated")
    return nc_version.gen3


def get_nc_sub_version() -> int:
    """Return the silicon revision, 0."""
    return 0
