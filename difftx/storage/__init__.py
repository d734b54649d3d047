"""Objects in buckets: paths, conditional writes, logs and locks. docs/storage_protocol.md states the protocol."""
