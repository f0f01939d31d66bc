"""Simulated and measured figures of the kernels, of drafters, of the demo pair and of servers."""
