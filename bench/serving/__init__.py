"""OpenAI-compatible servers under load."""
