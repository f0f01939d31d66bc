"""Noise, draw and acceptance: the sampling kernels."""
