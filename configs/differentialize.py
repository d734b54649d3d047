"""Continued training of a Transformer, or of a differential model to which `difftx convert` has converted it.

Command:  python -m difftx convert --from=difftx --to=difftx --input=runs/transformer --out=runs/zero_branch \
              --differential=zero-branch
          python train.py --config=configs/differentialize.py:runs/zero_branch --workdir=runs/zero_branch-trained
          python train.py --config=configs/differentialize.py:runs/transformer --workdir=runs/transformer-trained
          --config.train.teacher=runs/transformer makes the Transformer the teacher of the converted model.
          docs/differentialize.md explains these commands, and how to start from a model of Hugging Face.
Protocol: the argument is a run directory. Training starts from this run's newest parameters, with its model and data.
          Both models train on the same batches with the same settings. λ grows over `anneal_steps` updates. The
          settings are those that DEX (arXiv 2505.16333) states: 887M tokens at a learning rate of 1e-4.
Expected: nothing is reproduced here yet. configs/toy_continued.py has studies with 0.1M to 0.8M parameters.
"""

from pathlib import Path

from ml_collections import ConfigDict

from difftx.config.fields import values_of
from difftx.configs import base
from difftx.training.run import read_config

ARG = "{run}"  # Format of the recipe's argument; see base.py.


def get_config(run: str = "") -> ConfigDict:
    """Return the config that continues a run. Without `run`, return the config for `difftx convert --from=hf`."""
    c = base.get_config()
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup_steps = 0.05
    c.train.steps = 3400  # 8.9e8 tokens / 262,144 tokens per step, rounded up.
    c.eval.every_steps = 200
    c.checkpoint.every_steps = 200
    if run:
        values = values_of(read_config(Path(run)))
        c.model.update(values["model"])
        c.data.update(values["data"])
        c.checkpoint.init_from = run
    return c
