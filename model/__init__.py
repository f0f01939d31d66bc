"""Qwen3 by hand: its cache and sampling, and the fused speculative step."""
