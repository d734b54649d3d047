"""Config groups `optimizer`, `train`, `mesh`, `multihost`, `guards`, `checkpoint` and `logging`."""

from typing import Annotated, Literal

from difftx.config.fields import AxisLength, Extensible, Fraction, Group, NotNegative, Positive, Rule, Seed
from difftx.errors import UserError

DevicesAlongAxis = Annotated[int, Rule(lambda size: size == -1 or size > 0, " must be positive")]


class OptimizerConfig(Extensible, path="optimizer"):
    """The optimizer. Weight decay applies to projections and embeddings, but not to norm gains, λ vectors and sinks."""

    name: str = "adamw"
    """Optimizer: "adamw", or one of an extension."""
    schedule: str = "linear"
    """Learning-rate schedule: "linear" (warm-up and decay), or one of an extension."""
    learning_rate: Positive[float] = 1.5e-4
    """Peak learning rate, reached at the end of the warm-up."""
    final_learning_rate: NotNegative[float] = 0.0
    """Learning rate after the last step; the decay from the peak is linear."""
    warmup_steps: NotNegative[int] = 375
    """Steps of the linear warm-up from zero."""
    b1: Fraction = 0.9
    """Decay rate of the first moment."""
    b2: Fraction = 0.98
    """Decay rate of the second moment."""
    eps: Positive[float] = 1e-8
    """Term added to the denominator of Adam's update."""
    weight_decay: NotNegative[float] = 0.05
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: Positive[float] | None = 1.0
    """Largest global norm of the gradient; None: no clipping. The paper does not state a value."""


class TrainConfig(Group, path="train"):
    """Length of training, and size of an update."""

    steps: AxisLength = 40_000
    """Number of updates."""
    global_batch_tokens: AxisLength = 262_144
    """Tokens per update, over all devices and microbatches."""
    accumulation: AxisLength = 1
    """Microbatches per update; the gradient is the mean over all their tokens."""
    seed: Seed = 0
    """Seed of the parameters' initial values."""


class MeshConfig(Group, path="mesh"):
    """Number of devices along each axis of the mesh. One axis may be -1, which takes all remaining devices.

    `difftx.parallel.mesh` checks the product of the axes against the number of devices.
    """

    data: DevicesAlongAxis = 1
    """Copies of the parameters."""
    fsdp: DevicesAlongAxis = -1
    """Shards of the parameters, the optimizer's moments and the batch."""
    context: DevicesAlongAxis = 1
    """Shards of a row's tokens."""
    context_method: Literal["heads", "gather", "zigzag"] = "heads"
    """How attention communicates along `context`. "heads": devices exchange tokens for heads, whose number `context`
    must divide; "gather": each device gathers the keys and values of whole rows; "zigzag": as "gather", with causal
    work balanced over the devices."""
    tensor: DevicesAlongAxis = 1
    """Shards of heads, MLP width and vocabulary."""
    slices: Positive[int] = 1
    """Slices of a multi-slice TPU pod, joined by the data-centre network; they divide the axis `data`."""
    preset: Literal["none", "auto"] = "none"
    """With "auto", mesh, remat and accumulation come from the table in `difftx/parallel/presets.py`, by device and
    model size."""

    def __post_init__(self):
        super().__post_init__()
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "context", "tensor")}
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh={sizes}: only one axis can be -1, which takes all remaining devices")


class MultihostConfig(Group, path="multihost"):
    """Time limits, in seconds, for training with several processes (docs/operations.md)."""

    initialization_timeout_seconds: Positive[int] = 1800
    """Time for all processes to start; cold pods take long."""
    heartbeat_timeout_seconds: Positive[int] = 100
    """Silence after which a process, dead or frozen, counts as gone. JAX's own heartbeat gets four times as long."""
    barrier_timeout_seconds: Positive[int] = 600
    """Time for all processes to reach the same start, checkpoint or evaluation, and for a save to be on disk."""
    watchdog_seconds: Positive[int] = 1800
    """Time without a finished step, compilation included, after which a process prints all stacks and exits."""


class GuardsConfig(Group, path="guards"):
    """Detection of bad steps during training, and the reaction to them.

    An update whose loss or gradient is not finite is always skipped. A step is bad if its update was skipped or if its
    loss is a spike.
    """

    on_bad_steps: Literal["rewind", "stop"] = "rewind"
    """Reaction to too many bad steps in a row. "rewind":
    restore a good checkpoint and pass over the data of the bad steps; "stop": end the run with exit code 1."""
    max_skipped: Positive[int] = 10
    """Skipped updates among consecutive bad steps that trigger `on_bad_steps`."""
    skip_steps: NotNegative[int] = 100
    """Batches of data that a rewind passes over in addition to those of the bad steps."""
    max_rewinds: NotNegative[int] = 3
    """Rewinds per run; the next one ends the run."""
    spike_threshold: Positive[float] | None = None
    """A loss is a spike if it lies this many robust standard deviations (1.4826 MAD) above the median; a healthy run
    stays below about 6. None: no loss is a spike, so that compared runs see the same data."""
    spike_window_steps: Positive[int] = 128
    """Number of recent losses of good steps that give the median and the MAD."""
    spike_patience_steps: Positive[int] = 8
    """Spikes among consecutive bad steps that trigger `on_bad_steps`."""


class CheckpointConfig(Group, path="checkpoint"):
    """Writing, retention and verification of checkpoints."""

    every_steps: Positive[int] = 1000
    """Steps between checkpoints. The last step and a SIGTERM write one too."""
    keep: Positive[int] = 3
    """Number of newest checkpoints to keep, and of newest checkpoints at a multiple of `every_steps`."""
    keep_every_steps: Positive[int] | None = None
    """Also keep every checkpoint whose step is a multiple of this; None: no others."""
    keep_best: str | None = None
    """Also keep the checkpoint that is best by this number of a suite, such as "loss/loss". The suite must be one of
    `eval.suites` and run at every checkpoint. None: no best one is kept."""
    keep_best_mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest number is the best."""
    verify: Literal["checksums", "sizes"] = "checksums"
    """What a restore compares with the manifest. "checksums": every byte; "sizes": file names and lengths only."""
    max_failed_saves: Positive[int] = 3
    """Consecutive failed saves that end the run; each is retried at the next save point."""
    init_from: str | None = None
    """Path of a run (its newest checkpoint) or of a checkpoint whose weights start the training; None: random
    weights."""

    def __post_init__(self):
        super().__post_init__()
        if self.keep_best is not None and self.keep_best.count("/") != 1:
            raise UserError(f"checkpoint.keep_best={self.keep_best!r}: write SUITE/NUMBER, such as loss/loss")


class LoggingConfig(Group, path="logging"):
    """Destinations and frequency of training metrics."""

    every_steps: Positive[int] = 10
    """Steps between rows of `metrics.jsonl`."""
    tensorboard: bool = True
    """Whether to write event files to `<workdir>/tensorboard`."""
    wandb_project: str | None = None
    """Weights & Biases project that also receives the metrics (extra "wandb"); None: no project."""
