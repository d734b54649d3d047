"""What the model reads."""
