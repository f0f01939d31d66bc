"""`python -m bench.tune`: drafter, k, tp and batch for Qwen3-32B, from simulated times and accepted drafts."""
