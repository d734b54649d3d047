"""The suite outliers: large activations."""
