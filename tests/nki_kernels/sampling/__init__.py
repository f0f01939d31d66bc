"""Noise, draw and acceptance: against their laws, what they refuse."""
