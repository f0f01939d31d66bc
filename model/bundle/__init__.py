"""Files on disk: manifest, weights, checkpoints, shards."""
