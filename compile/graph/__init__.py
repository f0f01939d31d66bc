"""A planned graph becomes HLO, and is held against its plan."""
