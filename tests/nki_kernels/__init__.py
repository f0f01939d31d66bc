"""Tests of the kernels; the import lets nkisim answer to `nki` where the vendor's is absent."""

import nki_kernels  # noqa: F401
