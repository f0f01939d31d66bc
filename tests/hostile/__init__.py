"""Damages, kills, faults and wrong invocations: each series drawn from a seed, counted, and printed."""
