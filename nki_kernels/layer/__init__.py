"""The halves of a decoder layer for few rows, streaming packed weights."""
