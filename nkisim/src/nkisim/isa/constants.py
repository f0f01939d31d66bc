"""nki.isa.constants: the enumerations under the name that published kernels import them by."""

from nkisim.enums import *  # noqa: F403
