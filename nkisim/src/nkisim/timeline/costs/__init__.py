"""Cost laws: how long each engine, transfer and collective takes, and the table of which law an operation has."""
