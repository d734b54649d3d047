"""Training and validation data: preparation, token stores, rows and batches."""
