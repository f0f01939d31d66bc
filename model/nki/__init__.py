"""The NKI backend: kernels as custom calls of a graph, simulated on a CPU or compiled for a device."""
