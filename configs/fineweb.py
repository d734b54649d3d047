"""340M parameters on 10 billion tokens of a public corpus, FineWeb-Edu (arXiv 2406.17557).

Command:  python -m difftx prepare --input=hf:HuggingFaceFW/fineweb-edu:train:sample-10BT --tokenizer=cl100k_base \
              --out=stores/fineweb-edu --workers=16
          python train.py --config=configs/fineweb.py:diff --workdir=runs/fineweb-diff --config.mesh.preset=auto
          python train.py --config=configs/fineweb.py:transformer --workdir=runs/fineweb-transformer \
              --config.mesh.preset=auto
Protocol: the model, batch, learning rate and schedule of configs/by_size.py at 340m, for 10 billion tokens, 29 per
          parameter. The corpus is a sample of 10 billion GPT-2 tokens, so this is about one epoch.
Compute:  2e19 FLOPs (6 N D) per model. docs/operations.md has the hours and the memory by device.
Expected: nothing yet: neither model has been trained.
"""

import math

from ml_collections import ConfigDict

from difftx.configs import by_size

ARG = "{architecture}"  # Format of the recipe's argument; see base.py.

TOKENS = 10_000_000_000


def get_config(architecture: str = "diff") -> ConfigDict:
    """Return the config of an architecture: "diff", "transformer" or another value of `model.architecture`."""
    c = by_size.get_config(f"{architecture}-340m")
    c.data.path = "stores/fineweb-edu"
    c.train.steps = math.ceil(TOKENS / c.train.global_batch_tokens)
    return c
