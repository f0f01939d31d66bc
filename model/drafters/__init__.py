"""The drafters, one class per file; `registry.py` lists them, `model/drafter.py` defines their interface."""
