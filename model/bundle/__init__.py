"""What is on disk: manifest, weights, checkpoints, shards."""
