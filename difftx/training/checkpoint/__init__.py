"""Checkpoints of training: saving, verification, retention and reading."""
