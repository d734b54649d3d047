"""Minutes a table on a laptop: the paper's comparison scaled down to 0.1M parameters, on recall and on books.

Paper:    arXiv 2410.05258; §3.2's protocol (as many parameters and tokens, one data order, linear warm-up and decay) and
          Table 6's arms, a ten-thousandth of their size.
Command:  make reproduce    # all arms, both tasks, three seeds; compares with docs/results.md
          make study        # what chose the rates below and the initialisation
          python train.py --config=configs/toy.py:books-diff --workdir=runs/toy --config.data.path=stores/books
          python -m difftx sweep --config=configs/toy.py --grid task=recall arm=diff,transformer seed=0,1,2 --out=runs/recall
"""

from ml_collections import ConfigDict

from configs import ablations, architectures, base
from difftx.errors import did_you_mean

ARG = "{task}-{arm}"  # What `difftx sweep --grid` fills in.
HEADS = 8  # Of the Transformer, 8 wide.

ARMS = {**ablations.ARMS, "diff_v2": ablations.Arm("diff_v2")}


def get_config(arg: str = "books-diff") -> ConfigDict:
    """Return the config named `task-arm`."""
    known = [f"{task}-{arm}" for task in TASKS for arm in ARMS]
    if arg not in known:
        raise ValueError(f"{arg!r} is no task-arm such as 'books-diff'.{did_you_mean(arg, known)}")
    task, _, name = arg.partition("-")
    arm = ARMS[name]
    c = base.get_config()
    c.model.vocab_size = 264  # 256 bytes and <|endoftext|>, rounded up to a multiple of 8.
    c.model.d_model = 64
    c.model.num_layers = 2  # The least that recall takes: a token to the one before it, then a key to its value.
    c.model.mlp_dim = 2 * (4 * c.model.d_model // 3)
    c.model.compute_dtype = "float32"  # bfloat16 is emulated, and slower, on most CPUs.
    c.model.remat = "none"
    c.data.tokenizer = "bytes"
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.train.global_batch_tokens = 1024
    c.logging.tensorboard = False
    TASKS[task](c)
    c.optimizer.warmup_steps = c.train.steps // 20
    c.optimizer.learning_rate = 4e-3
    c.eval.every_steps = c.train.steps
    architectures.choose(c, arm.architecture, heads=HEADS)
    arm.change(c)
    return c


def _recall(c: ConfigDict) -> None:
    c.data.path = "synthetic:mqar"
    c.data.synthetic.vocab_size = 64
    c.data.synthetic.pairs = 8
    c.data.sequence_length = 64
    c.train.steps = 400


def _books(c: ConfigDict) -> None:
    c.data.path = "stores/books"  # python -m difftx prepare, see the Makefile.
    c.data.sequence_length = 128
    c.train.steps = 500
    c.eval.suites = ("loss", "recall", "outliers")
    c.eval.loss_tokens = 131_072
    c.eval.bigrams_path = "stores/books.bigrams"
    c.eval.outliers.tokens = 16_384


TASKS = {"recall": _recall, "books": _books}
