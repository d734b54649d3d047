"""The suite `harness`: tasks of lm-eval."""
