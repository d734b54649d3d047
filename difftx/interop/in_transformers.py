"""Compute logits, greedy text and token ids with the package transformers, in float32 on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np

from difftx.data.tokenizer import Tokenizer
from difftx.errors import RunError
from difftx.interop import remote_code_config
from difftx.interop.fields import CONFIG

TEXTS = 100  # Compare tokenizers on this many random texts, made of `PIECES`.
PIECES = (
    *("the", " and", "'LL", "Words", "12345", " 3.14", "?!", "</p>", "def f(x):\n    return x[0]", "--"),
    *("\n", "\r\n", "  ", "\t", "\u00a0", "\u3000", "\u200b", "▁", "\x00", "\x1b[0m"),
    *("é", "e\u0301", "ß", "ﬁ", "Ａ", "漢字", "العربية", "हिन्दी", "🙂", "👩\u200d👧", "\U0008e425"),
)


def load(folder: Path) -> Any:
    """Load the model in a folder with transformers, without executing code from the folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    loader = transformers.AutoModelForCausalLM
    if remote_code_config.is_ours(folder / CONFIG):
        from difftx.interop import modeling_difftx

        loader = getattr(modeling_difftx, remote_code_config.class_of(folder / CONFIG))
    # config.json can name an attention kernel that transformers would download and execute. "eager" overrides it. With
    # local_files_only, nothing else is downloaded either.
    options = {"attn_implementation": "eager", "local_files_only": True, "trust_remote_code": False}
    return loader.from_pretrained(folder, dtype=torch.float32, **options).eval()  # nosec B615


def logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits `[B, T, V]` of token ids."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens_BT)).logits.numpy()


def greedy(model: Any, prompts_BT: np.ndarray, length: int) -> np.ndarray:
    """Continue the prompts greedily, with a cache, to rows of `length` tokens. The rows include the prompts."""
    import torch
    import transformers

    # Do not use the folder's generation defaults, such as a repetition penalty or the end-of-text token.
    model.generation_config = transformers.GenerationConfig()
    prompts = torch.from_numpy(prompts_BT)
    options = {"do_sample": False, "max_length": length, "pad_token_id": 0}  # nosec B105: a token of text, not a password
    with torch.no_grad():
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options).numpy()


def compare_tokenizer(folder: Path, tokenizer: Tokenizer) -> str:
    """Compare the token ids of `TEXTS` texts and the end-of-text token with transformers. Return a message.

    Raise `RunError` if they differ. Texts begin with a letter, because transformers treats leading spaces differently
    (docs/tokenizers.md).
    """
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # nosec B615
    if theirs.eos_token_id != tokenizer.eot_token:
        raise RunError(
            f"the end-of-text token of transformers' tokenizer is {theirs.eos_token_id}, and that of difftx is "
            f"{tokenizer.eot_token}; nothing was written"
        )
    for choice in np.random.default_rng(0).integers(len(PIECES), size=(TEXTS, 12)):
        text = "a" + "".join(PIECES[i] for i in choice)
        if theirs(text, split_special_tokens=True)["input_ids"] != tokenizer.encode_prompt(text):
            raise RunError(f"transformers' tokenizer encodes {text!r} differently from difftx's; nothing was written")
    return f"verified: the token ids of {TEXTS} texts are equal"
