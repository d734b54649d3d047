"""The paper's comparison at 10M to 160M parameters, on recall and on books, in hours on one GPU.

Paper:    arXiv 2410.05258; the protocol of §3.2 (equal parameters and tokens, the same data order, linear warm-up and
          decay) and the arms of Table 6, at a tenth to a hundredth of their size.
Command:  benchmarks/gpu.sh small    # all tasks, sizes and arms, three seeds, in calls of under 10 minutes
          python -m difftx sweep --config=configs/small.py --grid size=10m task=books arm=diff,transformer \
              optimizer.learning_rate=5e-4,1e-3,2e-3,4e-3 model.num_heads=4,8,16 --out=runs/small-rates
Protocol: books: four epochs of the bytes of 160 novels. recall: half of the rows ask for one of 64 keys among 256
          distractors (difftx/data/synthetic.py); the other half ask for all of their keys, because one answer per row
          is a weak training signal. Learning rates and head widths are not tuned yet; the second command is the grid
          for that.
Hardware: one H200. Result: none yet.
Compute:  4e16 (10m) to 5e17 (160m) FLOPs per run on books, half of that on recall. At 300 TFLOP/s a run takes 2 to 27
          minutes, and all 240 runs take 36 hours.
"""

from ml_collections import ConfigDict

from difftx.configs import base, toy

ARG = "{task}-{size}-{arm}"  # Format of the recipe's argument; see base.py.

# Size → (d_model, number of layers).
SIZES = {"10m": (384, 6), "20m": (512, 6), "40m": (640, 8), "80m": (768, 12), "160m": (1024, 12)}


def get_config(arg: str = "books-10m-diff") -> ConfigDict:
    """Return the config of a task, a size and an arm, such as "books-10m-diff"."""
    base.require_known(arg, [f"{task}-{size}-{arm}" for task in TASKS for size in SIZES for arm in toy.ARMS], ARG)
    task, size, name = arg.split("-", 2)
    arm = toy.ARMS[name]
    c = base.get_config()
    c.model.d_model, c.model.num_layers = SIZES[size]
    c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    c.model.zero_init_output = True  # The best initialisation at 0.1M parameters (docs/exploratory.md).
    c.data.tokenizer = "bytes"
    c.optimizer.learning_rate = 1e-3  # Not tuned.
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.train.global_batch_tokens = 65_536
    c.checkpoint.every_steps = 200  # About once a minute, so that a killed run loses little work.
    TASKS[task](c)
    c.optimizer.warmup_steps = c.train.steps // 4  # A long warm-up, for the reason in configs/toy.py. Not tuned.
    c.eval.every_steps = c.train.steps // 10
    base.choose(c, arm.architecture, heads=16)  # diff then has 8, the minimum that the official code advises.
    arm.change(c)
    return c


def _recall(c: ConfigDict) -> None:
    c.model.vocab_size = c.data.synthetic.vocab_size
    c.data.sources = toy.RECALL
    c.data.synthetic.train_examples = 1_000_000
    c.data.sequence_length = 512  # An example of the task retrieval has 385 tokens.
    c.train.steps = 4000
    c.eval.suites = ("loss", "exact_match", "attention")


def _books(c: ConfigDict) -> None:
    c.model.vocab_size = base.BYTE_VOCABULARY
    c.data.path = "stores/books"  # `make books` writes this store and the counts.
    c.data.sequence_length = 1024
    c.train.steps = 7000
    c.eval.suites = ("loss", "recall", "needle", "attention", "outliers")
    c.eval.bigrams_path = "stores/books.bigrams"


TASKS = {"recall": _recall, "books": _books}
