"""The NKI kernels. Without the vendor's `nki` package, nkisim provides one of that name; kernels are the same."""

from nkisim.install import install

install()
