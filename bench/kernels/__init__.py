"""Kernels on the simulator: cases, times, bands."""
