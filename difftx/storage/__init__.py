"""Objects in buckets: paths, conditional writes and locks. docs/storage_protocol.md describes the protocol."""
