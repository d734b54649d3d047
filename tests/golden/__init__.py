"""Golden numbers: results of every architecture, packing mode and suite, recorded before a change of the code."""
