"""Qwen3, its paged KV cache and sampler, the drafters, and the fused speculative step, in torch."""
