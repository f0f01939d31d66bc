"""Which NeuronCore is simulated."""

from __future__ import annotations

import os

from nkisim.core.context import running
from nkisim.enums import nc_version
from nkisim.errors import BadLaunch, NotSimulated
from nkisim.geometry import CORES, Geometry

VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
_NAMES = {"trn1": 2, "inf2": 2, "gen2": 2, "trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}


def target(name: str | None = None) -> Geometry:
    """Return the core of a target; without a name of NEURON_PLATFORM_TARGET_OVERRIDE, trn2 when it is unset.

    The official simulator falls back to trn3.

    Raises:
        BadLaunch: the name is unknown.
        NotSimulated: the target is older than trn2.
    """
    name = name or os.environ.get(VARIABLE, "trn2")
    if name not in _NAMES:
        raise BadLaunch(VARIABLE, None, f"is {name!r}", f"it can be {', '.join(_NAMES)}")
    if _NAMES[name] not in CORES:
        raise NotSimulated("target", name, "trn2 (NeuronCore-v3) and trn3 (v4) are simulated")
    return CORES[_NAMES[name]]


def get_nc_version() -> nc_version:
    """Return the core of the running launch, or of the target that one would have."""
    core = running()
    return nc_version((core.geometry if core else target()).generation)


def get_nc_sub_version() -> int:
    """Return the silicon revision, 0."""
    return 0
