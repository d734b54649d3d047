"""Commands of difftx and eval.py, one module each."""
