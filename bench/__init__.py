"""Benchmarks whose numbers state their source."""
