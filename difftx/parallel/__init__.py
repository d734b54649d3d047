"""Where arrays live."""
