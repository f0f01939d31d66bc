"""Benchmarks: what is measured or modelled, each number with its source."""

from model.errors import quiet_start

quiet_start()
