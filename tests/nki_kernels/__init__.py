"""Tests of the kernels; the import provides nkisim as `nki` without the vendor's package."""

import nki_kernels  # noqa: F401
