"""Writing bundles: staging, shards, remote stores."""
