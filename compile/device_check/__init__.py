"""The device check: one table of checks, in the order of a first hour on a trn2 machine, and one runner."""
