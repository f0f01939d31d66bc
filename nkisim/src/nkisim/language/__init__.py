"""nki.language simulated: dtypes, memories, creation, math, loops."""

# ruff: noqa: F403
import nkisim.language.elementwise as _elementwise
from nkisim.isa.tokens import TOKENS as _TOKENS
from nkisim.language.composites import *
from nkisim.language.creation import *
from nkisim.language.dtypes import *
from nkisim.language.grids import *
from nkisim.language.loops import *
from nkisim.language.spmd import *
from nkisim.memory.tensor import NkiTensor as NkiTensor
from nkisim.objects import MemoryRegion as MemoryRegion
from nkisim.objects import NKIObject as NKIObject

# older spelling of a loop
range = range  # noqa: PLW0127

# importing it makes the math names executable
assert callable(_elementwise.run)

globals().update(_TOKENS, bool="bool")
