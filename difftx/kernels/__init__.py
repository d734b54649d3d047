"""Differential attention and softmax attention, each with several backends. `api.py` selects a backend per call."""

from difftx.kernels.api import BACKENDS as BACKENDS
from difftx.kernels.api import attend as attend
from difftx.kernels.api import attention as attention
from difftx.kernels.api import choose as choose
from difftx.kernels.api import diff_attention as diff_attention
from difftx.kernels.api import largest_logits as largest_logits
from difftx.kernels.api import rankings as rankings
from difftx.kernels.api import use as use
from difftx.kernels.api import weighted_attention as weighted_attention
from difftx.kernels.api import why_unavailable as why_unavailable
from difftx.kernels.backend import AttentionCall as AttentionCall
