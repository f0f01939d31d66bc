"""The server: what is allowed, the seed, the folder; and, where vLLM is installed, the server itself over HTTP."""
