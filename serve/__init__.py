"""A bundle behind `vllm serve`: our platform, its worker over our engine, what is allowed. vLLM is named only here."""
