"""The dialect that the NKI compiler accepts, as rules over kernel source."""
