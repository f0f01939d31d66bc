"""Benchmarks, measured or modelled; each number states its source."""

from model.errors import quiet_start

quiet_start()
