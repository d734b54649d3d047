"""Differential attention and softmax attention, each with several backends. `api.py` selects the backend of a call."""

from difftx.kernels.api import (
    BACKENDS,
    Implementation,
    attention,
    check_gradients,
    diff_attention,
    mapped_attention,
    why_unavailable,
)

__all__ = [
    "BACKENDS",
    "Implementation",
    "attention",
    "check_gradients",
    "diff_attention",
    "mapped_attention",
    "why_unavailable",
]
