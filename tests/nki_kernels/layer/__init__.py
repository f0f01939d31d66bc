"""The fused decoder layer and prefill's products."""
