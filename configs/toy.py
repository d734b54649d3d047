"""Minutes a table on two CPU cores: the paper's comparison at 0.1M parameters, on recall and on books.

Paper:    arXiv 2410.05258; §3.2's protocol (as many parameters and tokens, one data order, linear warm-up and decay)
          and the arms of Table 6, a ten-thousandth as large.
Command:  make reproduce    # all arms, both tasks, three seeds; compares with docs/results.md
          make study        # what the rates below and the initialisation come from
          python train.py --config=configs/toy.py:recall-diff --workdir=runs/toy
          python -m difftx sweep --config=configs/toy.py --grid task=books arm=diff,transformer seed=0,1 --out=runs/toy
Protocol: books: half a million bytes, drawn from 160 novels; books-0.8m: the same by a larger model. recall: rows of 32
          tokens with eight keys and their values, to be answered by the value of one, or of each in turn
          (difftx/data/synthetic.py). All warm up for half of their steps: in single runs a shorter warm-up costs the
          differential model more on books.
Hardware: 2 CPU cores. Result: docs/results.md.
"""

from difftx.configs import ablations, architectures, base
from ml_collections import ConfigDict

from difftx.errors import did_you_mean

ARG = "{task}-{arm}"  # What `difftx sweep --grid` fills in.

# Rows of the one ask for one of the keys, among distractors; of the other for all of them, as one answer a row teaches
# too little in so few tokens.
RECALL = (
    {"name": "retrieval", "path": "synthetic:retrieval", "weight": 0.5},
    {"name": "mqar", "path": "synthetic:mqar", "weight": 0.5},
)

ARMS = {**ablations.ARMS, "diff_v2": ablations.Arm("diff_v2")}

# task: (d_model, layers). Two layers are the least that recall takes: a token to the one before it, a key to its value.
SIZES = {"books": (64, 2), "recall": (64, 2), "books-0.8m": (128, 4)}

# Best for each arm among the rates of `make study`.
LEARNING_RATES = {
    "books": {
        "transformer": 8e-3,
        "transformer-8x256": 1.6e-2,
        "transformer-8x256-norm": 8e-3,
        "diff": 8e-3,
        "diff-no_norm": 1.6e-2,
        "diff-lambda_0.8": 8e-3,
        "diff-lambda_0.5": 8e-3,
        "diff_v2": 1.6e-2,
    },
    "recall": {
        "transformer": 5e-3,
        "transformer-8x256": 1e-2,
        "transformer-8x256-norm": 2.5e-3,
        "diff": 2.5e-3,
        "diff-no_norm": 1e-2,
        "diff-lambda_0.8": 5e-3,
        "diff-lambda_0.5": 5e-3,
        "diff_v2": 2.5e-3,
    },
    "books-0.8m": {"transformer": 4e-3, "diff": 2e-3, "diff_v2": 2e-3},
}


def get_config(arg: str = "books-diff") -> ConfigDict:
    """Return the config named `task-arm`."""
    known = {f"{task}-{name}": (task, name) for task, rates in LEARNING_RATES.items() for name in rates}
    if arg not in known:
        raise ValueError(f"{arg!r} is no task-arm such as 'books-diff'.{did_you_mean(arg, known)}")
    task, name = known[arg]
    arm = ARMS[name]
    c = base.get_config()
    c.model.vocab_size = 264  # 256 bytes and <|endoftext|>, rounded up to a multiple of 8.
    c.model.d_model, c.model.num_layers = SIZES[task]
    c.model.mlp_dim = 2 * (4 * c.model.d_model // 3)
    c.model.zero_init_output = True  # Best at 0.1M parameters, see docs/results.md.
    c.model.compute_dtype = "float32"  # bfloat16 is emulated, and slower, on most CPUs.
    c.model.remat = "none"
    c.data.tokenizer = "bytes"
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.logging.tensorboard = False
    heads = TASKS[task](c)
    c.optimizer.learning_rate = LEARNING_RATES[task][name]
    c.eval.every_steps = c.train.steps
    architectures.choose(c, arm.architecture, heads=heads)
    arm.change(c)
    return c


def _recall(c: ConfigDict) -> int:
    """Set what is the task's; return the Transformer's heads."""
    c.model.rope_theta = 100.0  # Rows are short: all angles turn in them.
    c.model.embedding_std = 0.5  # Of as much size as what attention adds: which token it is matters from the start.
    c.data.sources = RECALL
    c.data.synthetic.vocab_size = 64
    c.data.synthetic.pairs = 8
    c.data.synthetic.distractors = 15
    c.data.sequence_length = 32
    c.optimizer.weight_decay = 0.01
    c.train.global_batch_tokens = 512
    c.train.steps = 2000
    c.optimizer.warmup_steps = 1000
    c.eval.suites = ("loss", "exact_match", "attention")
    c.eval.needle.depths = (0.25, 0.5, 0.75)  # Of the attention's prompts, examples of retrieval.
    return 4


def _books(c: ConfigDict) -> int:
    """Set what is the task's; return the Transformer's heads."""
    c.data.path = "stores/books"  # `make reproduce` prepares it.
    c.data.sequence_length = 128
    c.train.global_batch_tokens = 1024
    c.train.steps = 500
    c.optimizer.warmup_steps = 250
    c.eval.suites = ("loss", "recall", "outliers")
    c.eval.loss_tokens = 131_072
    c.eval.bigrams_path = "stores/books.bigrams"
    c.eval.recall_max_bigram_count = 280_000  # Of all 114M bytes: about 1,250 of those that are trained on.
    c.eval.outliers.tokens = 16_384
    return 8


TASKS = {"recall": _recall, "books": _books, "books-0.8m": _books}
