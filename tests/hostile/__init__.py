"""Corrupt bundles, killed builds and wrong invocations: each series is random by a seed, counted and printed."""
