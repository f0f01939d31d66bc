"""`python -m bench.serving`: load on OpenAI-compatible endpoints, measured in tokens, not in lines."""
