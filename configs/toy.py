"""The paper's comparison at 0.1M parameters, on recall and on books, in minutes per table on two CPU cores.

Paper:    arXiv 2410.05258; the protocol of §3.2 (equal parameters and tokens, the same data order, linear warm-up and
          decay) and the arms of Table 6, at a ten-thousandth of their size.
Command:  make study-arms   # all arms, both tasks, three seeds; compares with docs/exploratory.md
          make study-toy    # the sweeps that the learning rates below and the initialisation come from
          python train.py --config=configs/toy.py:recall-diff --workdir=runs/toy
          python -m difftx sweep --config=configs/toy.py --grid task=books arm=diff,transformer seed=0,1 --out=runs/toy
Protocol: books: half a million bytes drawn from 160 novels. books-0.8m: the same data with a larger model. recall: rows
          of 32 tokens with eight keys and their values; the answer is the value of one key, or of each key in turn
          (difftx/data/synthetic.py). recall-easy: rows of 16 tokens with four keys, which a Transformer learns too. All
          runs warm up for half of their steps: in single runs on books, a shorter warm-up hurts the differential model
          more.
Hardware: 2 CPU cores. Result: docs/exploratory.md.
"""

from ml_collections import ConfigDict

from difftx.configs import ablations, base

ARG = "{task}-{arm}"  # Format of the recipe's argument; see base.py.

# Rows of "retrieval" ask for one of the keys among distractors. Rows of "mqar" ask for all keys, because with so few
# training tokens, one answer per row is too weak a signal.
RECALL = (
    {"name": "retrieval", "path": "synthetic:retrieval", "weight": 0.5},
    {"name": "mqar", "path": "synthetic:mqar", "weight": 0.5},
)

ARMS = {**ablations.ARMS, "diff_v2": base.Arm("diff_v2")}

# Task → (d_model, number of layers). Recall needs two layers: one to copy the previous token, one to find the key.
SIZES = {"books": (64, 2), "recall": (64, 2), "recall-easy": (64, 2), "books-0.8m": (128, 4)}

# Task → arm → the best learning rate in the sweeps of `make study`.
LEARNING_RATES = {
    "books": dict.fromkeys(ARMS, 8e-3) | dict.fromkeys(["transformer-8x256", "diff-no_norm", "diff_v2"], 1.6e-2),
    "recall": dict.fromkeys(ARMS, 5e-3)
    | dict.fromkeys(["transformer-8x256-norm", "diff", "diff_v2"], 2.5e-3)
    | dict.fromkeys(["transformer-8x256", "diff-no_norm"], 1e-2),
    "recall-easy": {"transformer": 2.5e-3},
    "books-0.8m": {"transformer": 4e-3, "diff": 2e-3, "diff_v2": 2e-3},
}


def get_config(arg: str = "books-diff") -> ConfigDict:
    """Return the config of a task and an arm, such as "books-diff"."""
    known = {f"{task}-{name}": (task, name) for task, rates in LEARNING_RATES.items() for name in rates}
    base.require_known(arg, known, ARG)
    task, name = known[arg]
    arm = ARMS[name]
    c = base.get_config()
    c.model.vocab_size = base.BYTE_VOCABULARY
    c.model.d_model, c.model.num_layers = SIZES[task]
    c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    c.model.zero_init_output = True  # The best initialisation at 0.1M parameters (docs/exploratory.md).
    c.model.compute_dtype = "float32"  # Most CPUs emulate bfloat16, which is slower.
    c.model.remat = "none"
    c.data.tokenizer = "bytes"
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.optimizer.warmup_steps = 0.5
    c.logging.trackers = ()
    heads = TASKS[task](c)
    c.optimizer.learning_rate = LEARNING_RATES[task][name]
    c.eval.every_steps = c.train.steps
    base.choose(c, arm.architecture, heads=heads)
    arm.change(c)
    return c


def _recall(c: ConfigDict) -> int:
    """Set the fields of the task recall, and return the Transformer's number of heads."""
    c.model.rope_theta = 100.0  # Small, so that all rotary angles change noticeably within the short rows.
    c.model.embedding_std = 0.5  # As large as attention's output, so that tokens matter from the start.
    c.data.sources = RECALL
    c.data.synthetic.vocab_size = 64
    c.data.synthetic.pairs = 8
    c.data.synthetic.distractors = 15
    c.data.sequence_length = 32
    c.optimizer.weight_decay = 0.01
    c.train.global_batch_tokens = 512
    c.train.steps = 2000
    c.eval.suites = ("loss", "exact_match", "attention")
    c.eval.needle.depths = (0.25, 0.5, 0.75)  # Suite attention uses these depths for its prompts.
    return 4


def _recall_easy(c: ConfigDict) -> int:
    """Set the fields of the task recall-easy, and return the Transformer's number of heads."""
    heads = _recall(c)
    c.data.synthetic.pairs = 4
    c.data.synthetic.distractors = 7
    c.data.sequence_length = 16
    c.train.global_batch_tokens = 256
    return heads


def _books(c: ConfigDict) -> int:
    """Set the fields of the task books, and return the Transformer's number of heads."""
    c.data.path = "stores/books"  # `make books` writes this store and the counts.
    c.data.sequence_length = 128
    c.train.global_batch_tokens = 1024
    c.train.steps = 500
    c.eval.suites = ("loss", "recall", "outliers")
    c.eval.loss_tokens = 131_072
    c.eval.bigrams_path = "stores/books.bigrams"
    c.eval.recall_max_bigram_count = 280_000  # As 1,250 in the training bytes: counts are over all 114M bytes.
    c.eval.outliers.tokens = 16_384
    return 8


TASKS = {"recall": _recall, "recall-easy": _recall_easy, "books": _books, "books-0.8m": _books}
