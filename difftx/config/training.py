"""Config groups `optimizer`, `train`, `mesh`, `multihost`, `guards`, `checkpoint` and `logging`."""

from typing import Annotated, Any, Literal

from difftx.config import affects, fields, flag
from difftx.config.fields import (
    AxisLength,
    Group,
    NotNegative,
    Positive,
    Rule,
    Seed,
    Unique,
    UnitClosed,
    UnitHalfOpen,
    UnitOpen,
)
from difftx.errors import UserError

Steps = Annotated[
    int | float,
    Rule(
        lambda steps: 0 <= steps < 1 or (type(steps) is int and steps > 0),
        ": write a number of steps, or a share of train.steps from 0 to less than 1",
    ),
]
DevicesAlongAxis = Annotated[int, Rule(lambda size: size == -1 or size > 0, " must be positive")]


class MuonConfig(Group):
    """Settings of optimizer muon."""

    momentum: affects.Training[UnitHalfOpen] = 0.95
    """Decay rate of the momentum."""
    split: affects.Training[Literal["none", "groups", "heads"]] = "none"
    """How a layer's query, key, value and output-gate weights are split into matrices before each matrix is
    orthogonalised. "none": the weight is one matrix (arXiv 2502.16982). "groups": the query and key weights of A1 and
    of A2 are separate matrices; other weights stay whole. "heads": each head, in each group, is a matrix (arXiv
    2602.15763 and 2607.24653)."""


class OptimizerConfig(fields.Extensible, effect=affects.Effect.TRAINING):
    """The optimizer. Weight decay applies to projections and embeddings, but not to vectors such as norm gains."""

    name: affects.Training[str] = "adamw"
    """Name of the optimizer: "adamw"; "muon", which orthogonalises the updates of projections and uses AdamW for all
    other parameters; or one of an extension."""
    schedule: flag.Branch[affects.Training[str]] = "linear"
    """Name of the learning-rate schedule after the warm-up. "linear" and "cosine" decay until the last step.
    "constant" does not decay. "wsd" (warm-up, stable, decay) decays only in the last steps. Extensions may add
    schedules."""
    learning_rate: flag.Branch[affects.Training[Positive[float]]] = 1.5e-4
    """Peak learning rate, reached at the end of the warm-up."""
    final_learning_rate: flag.Branch[affects.Training[NotNegative[float]]] = 0.0
    """Learning rate after the last step, at the end of the decay."""
    warmup_steps: flag.Branch[affects.Training[Steps]] = 375
    """Length of the linear warm-up from zero: a number of steps, or a share of `train.steps` below 1, such as 0.5."""
    decay_steps: flag.Branch[affects.Training[Positive[Steps]]] = 0.2
    """Length of the decay of schedule "wsd": a number of steps, or a share of `train.steps` below 1 (20 %: arXiv
    2405.18392)."""
    decay_shape: flag.Branch[affects.Training[Literal["sqrt", "linear"]]] = "sqrt"
    """Factor of the learning rate in the decay of schedule "wsd", where t runs from 0 to 1. "sqrt": 1 - √t, the best
    shape of arXiv 2405.18392. "linear": 1 - t."""
    lambda_learning_rate_factor: affects.Training[Positive[float]] = 1.0
    """Factor on the learning rate of the λ vectors of differential attention."""
    lambda_weight_decay: affects.Training[NotNegative[float]] = 0.0
    """Decoupled weight decay of the λ vectors. It is multiplied by their learning rate. As the vectors shrink, λ
    returns to λ_init."""
    muon: MuonConfig
    """Settings of optimizer muon."""
    b1: affects.Training[UnitHalfOpen] = 0.9
    """Decay rate of Adam's first moment."""
    b2: affects.Training[UnitHalfOpen] = 0.98
    """Decay rate of Adam's second moment."""
    eps: affects.Training[Positive[float]] = 1e-8
    """Term added to the denominator of Adam's update."""
    moment_dtype: affects.Training[Literal["float32", "bfloat16"]] = "float32"
    """Dtype in which AdamW's moments and Muon's momentum are stored. "bfloat16" saves 4 bytes of memory per
    parameter with AdamW. The moments are then rounded stochastically, so that their expected values are exact."""
    weight_decay: affects.Training[NotNegative[float]] = 0.05
    """Decoupled weight decay. It is multiplied by the learning rate."""
    clip_norm: affects.Training[Positive[float] | None] = 1.0
    """Largest global norm of the gradient. None: no clipping. The paper does not state a value."""
    qk_clip: affects.Training[Positive[float] | None] = None
    """Threshold τ of QK-Clip for attention logits (Kimi K2 has 100, arXiv 2507.20534). If the largest logit of a head,
    for A1 or A2, exceeds τ, the head's query and key weights are scaled down after the update so that it becomes τ.
    None: no clipping."""

    def __post_init__(self):
        if self.final_learning_rate > self.learning_rate:
            raise UserError(
                f"optimizer.final_learning_rate={self.final_learning_rate} exceeds optimizer.learning_rate="
                f"{self.learning_rate}, the peak; lower it, or raise the peak"
            )


class TrainConfig(Group):
    """Length of training, and size of each update."""

    steps: flag.Resume[affects.Training[AxisLength]] = 40_000
    """Number of updates."""
    global_batch_tokens: flag.Kernel[affects.Training[AxisLength]] = 262_144
    """Number of tokens per update, over all devices and microbatches."""
    accumulation: flag.Preset[flag.Kernel[affects.Rounding[AxisLength]]] = 1
    """Number of microbatches per update. The gradient is the mean over the tokens of all microbatches."""
    ema_decay: affects.Training[UnitOpen | None] = None
    """Decay rate per update of an exponential moving average of the weights. `difftx eval`, `difftx generate` and
    `difftx convert` use the average with the flag --weights=ema. None: no average."""
    trainable: affects.Training[Unique[tuple[str, ...]]] = ()
    """Paths of the parameters that are trained, such as "blocks/attention/lambda_*", where * stands for any text. All
    others are frozen: they have neither gradients nor moments. Empty: all parameters, or only the adapters if
    `lora_rank` is set."""
    lora_rank: affects.Training[AxisLength | None] = None
    """Rank of an adapter A B that is added to each weight W of attention and MLP (LoRA, arXiv 2106.09685). Checkpoints
    store W, A and B. Commands that load a checkpoint use the merged weight W + A B. None: no adapters."""
    lora_alpha: affects.Training[Positive[float]] = 16.0
    """The factor of an adapter is `lora_alpha` / `lora_rank`."""
    z_loss: affects.Training[NotNegative[float]] = 0.0
    """Coefficient of the z-loss, the mean of log² Z over the tokens of the loss. Z is the denominator of the softmax
    over the vocabulary. PaLM has 1e-4 (arXiv 2204.02311). `loss` in `metrics.jsonl` does not contain the z-loss."""
    teacher: flag.Bucket[flag.Resume[affects.Training[str | None]]] = None
    """Checkpoint, or run with checkpoints, from which the teacher is loaded. The loss is then (1 - w) NLL +
    w t² KL(teacher ‖ model), with w = `distill_weight` and the temperature t = `distill_temperature` (arXiv
    1503.02531). None: no teacher."""
    distill_weight: affects.Training[UnitClosed] = 0.5
    """Weight of the teacher in the loss."""
    distill_temperature: affects.Training[Positive[float]] = 1.0
    """Divisor of both models' logits in the KL divergence."""
    seed: flag.Seed[affects.Training[Seed]] = 0
    """Random seed of the initial parameters."""
    kernel_choice: affects.Rounding[Literal["measured", "fixed"]] = "measured"
    """How `model.attention_implementation="auto"` selects the attention kernel on GPUs and TPUs. "measured": at the
    first start of a run, all kernels are compared with the reference and timed for its shapes, for up to a minute.
    "fixed": a fixed order. CPUs always use "xla"."""
    compilation_cache: affects.Nothing[str] = "auto"
    """Folder where compiled programs are cached for later starts. "auto": JAX_COMPILATION_CACHE_DIR if it is set, else
    a folder in the user's cache folder, as for all other commands. "off": no cache."""


class MeshConfig(Group):
    """Number of devices along each axis of the mesh. One axis may be -1: it gets all remaining devices."""

    data: flag.Preset[flag.Kernel[affects.Rounding[DevicesAlongAxis]]] = 1
    """Number of copies of the parameters."""
    fsdp: flag.Preset[flag.Kernel[affects.Rounding[DevicesAlongAxis]]] = -1
    """Number of shards of the parameters, the optimizer's moments and the batch."""
    context: flag.Kernel[affects.Rounding[DevicesAlongAxis]] = 1
    """Number of shards of each row's tokens."""
    context_method: flag.Kernel[affects.Rounding[Literal["heads", "gather", "zigzag"]]] = "heads"
    """How attention communicates along `context`. "heads": each device computes whole rows for some heads, so `context`
    must divide the number of heads. "gather": each device gathers the keys and values of whole rows. "zigzag": like
    "gather", but with tokens ordered so that all devices compute equal amounts of causal attention."""
    tensor: flag.Preset[flag.Kernel[affects.Rounding[DevicesAlongAxis]]] = 1
    """Number of shards of the heads, the MLP width and the vocabulary."""
    slices: flag.Kernel[affects.Rounding[Positive[int]]] = 1
    """Number of TPU slices that the data-centre network connects. It must divide `data`."""
    preset: flag.Kernel[affects.Rounding[Literal["none", "auto"]]] = "none"
    """Whether `difftx/parallel/presets.py` selects mesh, remat and accumulation for the device and the model size."""

    def __post_init__(self):
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "context", "tensor")}
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh={sizes}: only one axis can be -1, which takes all remaining devices")


class MultihostConfig(Group):
    """Time limits, in seconds, for training with several processes (docs/operations.md)."""

    initialization_timeout_seconds: affects.Nothing[Positive[int]] = 1800
    """Time for all processes to start. The default is long, because pods may start slowly."""
    heartbeat_timeout_seconds: affects.Nothing[Positive[int]] = 100
    """Time without a heartbeat after which a process counts as dead. JAX's own limit is four times as long."""
    barrier_timeout_seconds: affects.Nothing[Positive[int]] = 600
    """Time for all processes to reach a common point, such as a checkpoint, and for a save to be on disk."""
    lock_takeover_seconds: affects.Nothing[
        Annotated[int, Rule(lambda seconds: seconds >= 10, " must be at least 10")]
    ] = 60
    """Time without a sign of life after which a run in a bucket counts as abandoned, so that another process may take
    it over. If both processes have different values, the longer one counts. A process writes six signs of life in this
    time (docs/storage.md). Google Cloud Storage allows one write per second. Local disks do not use this time."""
    watchdog_seconds: affects.Nothing[Positive[int]] = 1800
    """Time limit for a step, for its compilation, and for the restore of a checkpoint. A process that exceeds it prints
    all stacks and exits. Verifying a checkpoint and exporting may take longer, as long as they make progress."""


class GuardsConfig(Group):
    """How to detect bad steps, and how to react to them.

    A step is bad if its loss is a spike, or if its update was skipped because the loss or the gradient was not finite.
    """

    on_bad_steps: flag.Resume[affects.Training[Literal["rewind", "stop"]]] = "rewind"
    """Reaction to too many bad steps in a row. "rewind": restore a good checkpoint and skip the data of the bad steps.
    "stop": end the run with exit code 1."""
    max_skipped: flag.Resume[affects.Training[Positive[int]]] = 10
    """Number of skipped updates among consecutive bad steps that triggers `on_bad_steps`."""
    skip_steps: flag.Resume[affects.Training[NotNegative[int]]] = 100
    """Number of batches that a rewind skips in addition to those of the bad steps."""
    max_rewinds: flag.Resume[affects.Training[NotNegative[int]]] = 3
    """Largest number of rewinds per run. If one more is needed, the run ends."""
    spike_threshold: flag.Resume[affects.Training[Positive[float] | None]] = None
    """A loss is a spike if it is more than this number of robust standard deviations (1.4826 MAD) above the median. A
    healthy run stays below about 6. None: no loss counts as a spike, so that compared runs see the same data."""
    spike_window_steps: flag.Resume[affects.Training[Positive[int]]] = 128
    """Number of recent losses of good steps from which the median and the MAD are computed."""
    spike_patience_steps: flag.Resume[affects.Training[Positive[int]]] = 8
    """Number of spikes among consecutive bad steps that triggers `on_bad_steps`."""


class CheckpointConfig(Group):
    """Writing, retention and verification of checkpoints."""

    every_steps: affects.Nothing[Positive[int]] = 1000
    """Number of steps between checkpoints. The last step and a SIGTERM also write one."""
    every_minutes: affects.Nothing[Positive[float] | None] = None
    """Write a rolling checkpoint if the last checkpoint is older than this number of minutes. An interruption then
    loses at most about this time. The next complete checkpoint replaces it. None: no rolling checkpoint."""
    keep: affects.Nothing[Positive[int]] = 3
    """Number of newest checkpoints to keep, and number of newest checkpoints at multiples of `every_steps` to keep."""
    keep_every_steps: affects.Nothing[Positive[int] | None] = None
    """Also keep all checkpoints at multiples of this step. None: no further checkpoints."""
    export_every_steps: affects.Nothing[Positive[int] | None] = None
    """Number of steps between exports to `<workdir>/exports/<step>` for the package transformers (docs/serving.md). It
    must be a multiple of `every_steps`. None: no exports."""
    keep_best: affects.Nothing[str | None] = None
    """Result of a suite, such as "loss/loss", by which the best checkpoint is chosen and kept. The suite must be one of
    `eval.suites` and run at every checkpoint. Only results with the same validation sets and `eval` fields as the
    newest checkpoint are compared. None: no best checkpoint is kept."""
    keep_best_mode: affects.Nothing[Literal["min", "max"]] = "min"
    """Whether the smallest or the largest value of `keep_best` is the best."""
    verify: affects.Nothing[Literal["checksums", "sizes"]] = "checksums"
    """What is verified before a checkpoint is restored. "checksums": every byte. "sizes": only file names and sizes."""
    max_failed_saves: affects.Nothing[Positive[int]] = 3
    """Number of consecutive failed saves that ends the run. After fewer, training continues until the next save."""
    init_from: flag.Bucket[affects.Start[str | None]] = None
    """Path of a checkpoint, or of a run with checkpoints, that provides the initial weights. None: random weights."""
    branch_from: flag.Bucket[affects.Start[str | None]] = None
    """Path of a checkpoint, or of a run with checkpoints, from which this run branches: it starts with the checkpoint's
    weights, optimizer state, step and position in the data. The learning-rate schedule may differ. None: no branch."""

    def __post_init__(self):
        if (exports := self.export_every_steps) is not None and exports % self.every_steps:
            raise UserError(
                f"checkpoint.export_every_steps={exports} must be a multiple of checkpoint.every_steps="
                f"{self.every_steps}, because a checkpoint is exported"
            )
        if self.keep_best is not None and self.keep_best.count("/") != 1:
            raise UserError(f"checkpoint.keep_best={self.keep_best!r}: write SUITE/NUMBER, such as loss/loss")
        if self.init_from is not None and self.branch_from is not None:
            raise UserError(
                f"checkpoint.init_from={self.init_from} and checkpoint.branch_from={self.branch_from} are both set; "
                "set only one of them"
            )


class LoggingConfig(Group):
    """Destinations and frequency of training metrics."""

    every_steps: affects.Nothing[Positive[int]] = 10
    """Number of steps between rows of `metrics.jsonl`."""
    attention_logits_every_steps: affects.Nothing[Positive[int] | None] = None
    """Number of steps between rows with `largest_logits`: the largest attention logit of each layer, head and group (A1
    and A2). It must be a multiple of `every_steps`. None: no such rows."""
    trackers: affects.Nothing[Unique[tuple[str, ...]]] = ("tensorboard",)
    """Further destinations of the metrics: tensorboard (event files in `<workdir>/tensorboard`), wandb:PROJECT (Weights
    & Biases), trackio:PROJECT or mlflow:EXPERIMENT. Each of the last three requires the extra with its name. If PROJECT
    or EXPERIMENT is left out, it is "difftx"."""
    profile_steps: affects.Nothing[tuple[int, ...]] = ()
    """First step and number of steps to trace, such as (10, 3). Process 0 writes the trace to `<workdir>/profile`, for
    xprof and Perfetto. Empty: no trace."""

    def watches(self, step: Any) -> Any:
        """Return whether the largest attention logits are logged at a step. `step` may be a traced integer."""
        every = self.attention_logits_every_steps
        return False if every is None else step % every == 0

    def __post_init__(self):
        if (every := self.attention_logits_every_steps) is not None and every % self.every_steps:
            raise UserError(
                f"logging.attention_logits_every_steps={every} must be a multiple of logging.every_steps="
                f"{self.every_steps}, the steps that have a row"
            )
        if self.profile_steps and (len(self.profile_steps) != 2 or min(self.profile_steps) < 1):
            raise UserError(
                f"logging.profile_steps={self.profile_steps}: write the first step, from 1, and the number of steps, "
                "such as 10,3"
            )
