"""Recipes. Each file is the record of one experiment. Start with `base.py`."""
