"""Wall time of ways to serve the same requests, side by side."""
