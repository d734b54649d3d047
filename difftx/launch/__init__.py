"""Before and around training: what a config costs on devices that are not here, and many runs at once."""
