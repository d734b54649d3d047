"""Golden numbers: what every architecture, packing mode and suite computed, recorded before a change of the code."""
