"""The NKI backing: kernels of the graph as custom calls, simulated here or run on a device."""
