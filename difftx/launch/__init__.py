"""Starting runs: many on this machine, or job files for a cluster."""
