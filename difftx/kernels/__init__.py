"""Differential attention and softmax attention, each with several backends. `api.py` selects the backend of a call."""

from difftx.kernels.api import BACKENDS as BACKENDS
from difftx.kernels.api import Implementation as Implementation
from difftx.kernels.api import attention as attention
from difftx.kernels.api import check_gradients as check_gradients
from difftx.kernels.api import diff_attention as diff_attention
from difftx.kernels.api import mapped_attention as mapped_attention
from difftx.kernels.api import why_unavailable as why_unavailable
