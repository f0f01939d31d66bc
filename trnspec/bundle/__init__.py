"""A bundle on disk: spec, plan, manifest, checkpoint, shards, HLO."""
