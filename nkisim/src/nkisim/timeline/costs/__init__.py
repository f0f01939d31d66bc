"""Cost laws: how long each engine, transfer and collective takes, and the table of laws by operation."""
