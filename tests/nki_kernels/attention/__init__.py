"""Verification attention: against its law, its bits, its times, what it refuses."""
