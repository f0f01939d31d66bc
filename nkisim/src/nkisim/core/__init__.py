"""The cores that run a kernel: their state, their accesses to memory, the races between them."""
