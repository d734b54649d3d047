"""Objects in buckets: paths, conditional writes, logs and locks. docs/storage.md states the protocol."""
