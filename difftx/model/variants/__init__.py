"""Architectures that are compared with differential attention, one per file."""
