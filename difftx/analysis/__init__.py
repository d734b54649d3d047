"""Mathematical analysis of measurements from runs, without input or output."""
