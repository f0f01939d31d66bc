"""The pictures of README and docs: drawn from data and committed results by one command."""
