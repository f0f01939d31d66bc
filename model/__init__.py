"""Qwen3 by hand, its cache and sampling, the fused speculative step, and the code that runs a bundle."""
