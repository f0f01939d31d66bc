"""A planned graph becomes HLO, and is compared with its plan."""
