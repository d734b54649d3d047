"""Further attention architectures, for comparison with differential attention."""
