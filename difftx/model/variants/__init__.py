"""Further attention architectures, to compare with differential attention."""
