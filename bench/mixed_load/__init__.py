"""A mixed load with switching against every fixed k."""
