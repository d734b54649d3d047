"""Mathematical reasoning of the 64K models (camera-ready of arXiv 2410.05258, Appendix C): two stages.

Command:  python train.py --config=configs/math.py:diff-stage1 --workdir=runs/diff-math1 \
              --config.checkpoint.init_from=runs/diff-64k --config.data.path=stores/math
          python -m difftx prepare --input='openthoughts/*.jsonl' --prompt_field=problem --text_field=solution \
              --tokenizer=cl100k_base --out=stores/openthoughts
          python train.py --config=configs/math.py:diff-stage2 --workdir=runs/diff-math2 \
              --config.checkpoint.init_from=runs/diff-math1 --config.data.path=stores/openthoughts
          python eval.py --workdir=runs/diff-math2 --suite=math
Protocol: stage 1: 20B tokens of synthetic mathematics, learning rate 8e-5, 4M tokens per batch, evaluation every 2B
          tokens; other settings are those of configs/long_context.py. Stage 2: 2B tokens of worked solutions, learning
          rate 1e-5, 1M tokens per batch, rows of 16K. The loss counts only the solutions. Best-fit packing keeps
          documents whole, and attention does not cross from one document to another.
Expected: stage 2: an average accuracy of 50.8 % over eight benchmarks; the Transformer has 43.3 %. Not reproduced here
          yet.
Compute:  1.8e21 FLOPs in stage 1 (1.1e21 if causal attention is counted as half), 8e19 in stage 2.
"""

from ml_collections import ConfigDict

from difftx.configs import base, long_context

ARG = "{architecture}-{stage}"  # Format of the recipe's argument; see base.py.


def get_config(arg: str = "diff-stage1") -> ConfigDict:
    """Return the config of an architecture and a training stage, such as "diff-stage2"."""
    architecture, _, stage = arg.rpartition("-")
    base.require_known(stage, ("stage1", "stage2"), "{stage}")
    c = long_context.get_config(architecture)
    c.data.upsampling.longer_than_tokens = None
    c.train.steps = 4769  # 2e10 tokens / 4,194,304 tokens per step, rounded up.
    c.checkpoint.every_steps = c.eval.every_steps = 477  # Every 2B tokens.
    c.checkpoint.keep_every_steps = 477
    c.eval.math.new_tokens = 1024
    if stage == "stage2":
        c.data.sequence_length = 16_384
        c.data.packing = "best_fit"
        c.data.document_mask = True
        c.optimizer.learning_rate = 1e-5
        c.train.global_batch_tokens = 1_048_576
        c.train.steps = 1908  # 2e9 tokens / 1,048,576 tokens per step, rounded up.
        c.checkpoint.every_steps = c.eval.every_steps = 100
        c.checkpoint.keep_every_steps = 100
        c.eval.math.new_tokens = 16_384  # The context length, which question and answer share.
    return c
