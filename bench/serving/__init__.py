"""Two OpenAI-compatible endpoints under load."""
