"""Every claim of docs/results.md follows from docs/results.json, without the use of benchmarks/controls_tables.py.

The files of tests follow the sections of the page. `claim` (page.py) connects each sentence with its test.
"""
