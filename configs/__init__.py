"""Configs: each file is the record of an experiment. Start with `base.py`."""
