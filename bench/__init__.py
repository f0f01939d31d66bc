"""Benchmarks, measured or modelled; each number states its source."""
