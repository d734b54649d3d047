"""Trainings, analysis and pages of the studies: docs/results.md, docs/exploratory.md and the findings in README.md."""
