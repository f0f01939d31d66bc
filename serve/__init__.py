"""A bundle behind `vllm serve`: platform, worker, what is allowed. vLLM's names appear here only."""
