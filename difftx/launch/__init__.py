"""Before and around training: what a config costs on a device that is not here, and many runs at once."""
