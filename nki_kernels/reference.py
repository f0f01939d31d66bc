"""The laws of the kernels: plain numpy in fp64, loops welcome, no `nki`.

Dimension key: B sequences, H query heads, G kv heads, D head dim, N = k + 1 candidate rows,
S positions, V vocabulary, R rows.
"""
