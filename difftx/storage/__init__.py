"""Objects in buckets: paths, conditional writes and locks. docs/storage_protocol.md states the protocol."""
