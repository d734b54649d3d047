"""The paper's 3B differential model and its matched Transformer (arXiv 2410.05258, §3.1 and Appendix B, Table 9).

Command:  python train.py --config=configs/diff_3b.py:diff --config.data.path='corpus/*.txt' --workdir=runs/diff-3b
          (diff, transformer, or another architecture, with as many parameters)
Protocol: Table 9, with 1T tokens (Table 1). Appendix B's comparison stops at 350B (--config.train.steps=83_447).
Expected: Tables 1, 2, 5 and 8. Not reproduced here yet.
Note:     the paper calls the model 2.8B, but these sizes, with a shared embedding, give 3.48B parameters.
"""

from ml_collections import ConfigDict

from difftx.configs import base

ARG = "{architecture}"  # Format of the recipe's argument; see base.py.


def get_config(architecture: str = "diff") -> ConfigDict:
    """Return the config of an architecture: "diff", "transformer" or another value of `model.architecture`."""
    c = base.get_config()
    c.model.d_model = 3072
    c.model.num_layers = 28
    c.model.mlp_dim = 8192
    c.data.sequence_length = 4096
    c.optimizer.learning_rate = 3.2e-4
    c.optimizer.final_learning_rate = 1.28e-5
    c.optimizer.warmup_steps = 1000
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.train.steps = 238_419  # 1e12 tokens / 4,194,304 tokens per step, rounded up.
    c.train.global_batch_tokens = 4_194_304
    c.checkpoint.keep_every_steps = 10_000  # Figure 3b of the paper needs these 23 checkpoints of 42 GB each.
    base.choose(c, architecture, heads=24)
    return c
