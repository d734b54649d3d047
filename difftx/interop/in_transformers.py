"""Logits and greedy text of the package transformers from a model folder, in float32 on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np

from difftx.interop import remote_code_config
from difftx.interop.fields import CONFIG


def load(folder: Path) -> Any:
    """Return the model in a folder, as transformers loads it, but without executing code of the folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    loader = transformers.AutoModelForCausalLM
    if remote_code_config.is_ours(folder / CONFIG):
        from difftx.interop import modeling_difftx

        loader = getattr(modeling_difftx, remote_code_config.class_of(folder / CONFIG))
    # A config.json can name an attention kernel that transformers would download and execute; "eager" replaces it. The
    # folder is local and local_files_only is set, so nothing is downloaded.
    options = {"attn_implementation": "eager", "local_files_only": True, "trust_remote_code": False}
    return loader.from_pretrained(folder, dtype=torch.float32, **options).eval()  # nosec B615


def logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits `[B, T, V]` of token ids."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens_BT)).logits.numpy()


def greedy(model: Any, prompts_BT: np.ndarray, length: int) -> np.ndarray:
    """Return rows of `length` tokens: prompts and the most likely continuations, decoded with a cache."""
    import torch
    import transformers

    # The folder's defaults of generation, such as a penalty or the end-of-text token, must not apply.
    model.generation_config = transformers.GenerationConfig()
    prompts = torch.from_numpy(prompts_BT)
    options = {"do_sample": False, "max_length": length, "pad_token_id": 0}  # nosec B105: a token of text, not a password
    with torch.no_grad():
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options).numpy()
