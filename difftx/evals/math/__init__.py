"""The suite `math`: problems with numeric answers."""
