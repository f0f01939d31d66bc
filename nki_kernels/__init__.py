"""The NKI kernels, run on Trainium as they are.

Where the vendor's `nki` is absent, nkisim answers to that name; no kernel knows the difference.
"""

from nkisim.install import install

install()
