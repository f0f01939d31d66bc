"""Verification and prefill attention."""
