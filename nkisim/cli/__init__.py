"""The commands `nkisim run|time|report|trace`; lint, coverage and accuracy have modules of their own."""
