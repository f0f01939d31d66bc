"""The one seam to the kernels: each operation that a Trainium kernel will serve, by one name.

Backings share these signatures. Today there is one, the reference in torch; `nki_kernels/`
takes these places without a change to the model.
"""

from model.attention import verify_attention
from model.sampling import accept, coupled_sample

__all__ = ["accept", "coupled_sample", "verify_attention"]
