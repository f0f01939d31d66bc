"""Verification attention: N candidate rows a sequence against the cache."""
