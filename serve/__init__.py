"""A bundle behind `vllm serve`: platform, worker, allowed parameters. vLLM's names appear here only."""
