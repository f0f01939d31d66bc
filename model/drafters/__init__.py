"""The drafters: one class a file, listed in `model/drafters/registry.py`; the protocol is `model/drafter.py`."""
