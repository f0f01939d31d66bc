"""`vllm serve` of a bundle: platform, worker, allowed parameters. vLLM's names appear here only."""
