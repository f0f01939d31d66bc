"""The NKI kernels and their laws; the kernels themselves are not written yet."""
