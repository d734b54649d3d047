"""The schema of a config: frozen dataclasses that check themselves. Fields and units: `configs/base.py`."""

import dataclasses
import json
from typing import Literal

from difftx.config.architectures import TWO_GROUPS, Architecture, Granularity, Implementation, check_architecture
from difftx.config.checks import (
    divisor_below,
    divisors,
    require_not_negative,
    require_positive,
    require_seed,
    require_size,
)
from difftx.config.data import SYNTHETIC, DataConfig
from difftx.config.eval import EvalConfig
from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Group `model`."""

    architecture: Architecture
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    signal_heads: int | None
    top_k: int | None
    mlp_dim: int
    rope_theta: float
    norm_eps: float
    head_norm: Literal["none", "rms", "rms_affine", "scalar"]
    head_norm_eps: float
    lambda_init: float | None
    lambda_learned: bool
    lambda_std: float
    post_scale: float | None
    init: Literal["fan_in", "normal"]
    init_std: float
    embedding_std: float
    zero_init_output: bool
    tie_embeddings: bool
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "dots", "full", "offload"]
    attention_implementation: Implementation
    attention_logit_bits: int | None
    attention_logit_granularity: Granularity

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "mlp_dim"):
            require_size("model", name, getattr(self, name))
        for name in ("rope_theta", "norm_eps", "head_norm_eps"):
            require_positive("model", name, getattr(self, name))
        for name in ("lambda_std", "init_std", "embedding_std"):
            require_not_negative("model", name, getattr(self, name))
        check_architecture(self)
        width = self._heads_across(self.num_heads)
        if self.head_dim is None and self.d_model % width:
            step = self.signal_heads or 1
            unit = self._heads_across(step)
            fitting = [step * (n // unit) for n in divisors(self.d_model)[:-1] if n % unit == 0]
            nearest = min(fitting, key=lambda n: abs(n - self.num_heads), default=step)
            heads = "2 * num_heads" if self.groups == 2 else "num_heads"
            if self.architecture == "gda":
                heads = "num_heads + num_heads / signal_heads"
            raise UserError(
                f"model.num_heads={self.num_heads}: {heads} = {width} does not divide d_model={self.d_model}; "
                f"use {nearest}, or set model.head_dim"
            )
        if self.head_dim is not None:
            require_size("model", "head_dim", self.head_dim)
        if self.d_head % 2:
            raise UserError(f"model.head_dim={self.d_head}: the rotary embedding turns pairs; use an even head_dim")
        if self.num_kv_heads is not None:
            require_size("model", "num_kv_heads", self.num_kv_heads)
            if self.noise_heads % self.num_kv_heads:
                whole = "num_heads" if self.architecture != "gda" else "num_heads / signal_heads"
                raise UserError(
                    f"model.num_kv_heads={self.num_kv_heads} does not divide {whole}={self.noise_heads}; "
                    f"use {divisor_below(self.num_kv_heads, self.noise_heads)}"
                )

    @property
    def groups(self) -> int:
        """Keys of a key/value head, and width of its value in d: 2 where heads have two maps, as A1 and A2 of Eq. 1."""
        return 2 if self.architecture in TWO_GROUPS else 1

    @property
    def noise_heads(self) -> int:
        """Heads of A2's queries: one for each head, or for several in grouped differential attention."""
        return self.num_heads // (self.signal_heads or 1)

    @property
    def query_heads(self) -> int:
        """Queries of width d."""
        return 2 * self.num_heads if self.architecture == "diff_v2" else self._heads_across(self.num_heads)

    @property
    def d_head(self) -> int:
        """Width d of a query/key (sub-)head."""
        return self.head_dim or self.d_model // self._heads_across(self.num_heads)

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.noise_heads

    @property
    def has_lambda_vectors(self) -> bool:
        """Whether a layer learns λ as Eq. 2 has it."""
        return self.architecture in ("diff", "gda") and self.lambda_learned

    def _heads_across(self, num_heads: int) -> int:
        """Heads of width d that d_model is cut into."""
        return num_heads + num_heads // self.signal_heads if self.signal_heads else self.groups * num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Group `optimizer`."""

    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            require_positive("optimizer", name, getattr(self, name))
        for name in ("final_learning_rate", "warmup_steps", "weight_decay"):
            require_not_negative("optimizer", name, getattr(self, name))
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} must lie in [0, 1)")
        if self.clip_norm is not None:
            require_positive("optimizer", "clip_norm", self.clip_norm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Group `train`."""

    steps: int
    global_batch_tokens: int
    accumulation: int
    seed: int

    def __post_init__(self):
        for name in ("steps", "global_batch_tokens", "accumulation"):
            require_size("train", name, getattr(self, name))
        require_seed("train", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Group `mesh`; the product is checked against the devices in `difftx.parallel.mesh`."""

    data: int
    fsdp: int
    context: int
    tensor: int
    context_method: Literal["heads", "gather", "zigzag"]
    slices: int
    preset: Literal["none", "auto"]

    def __post_init__(self):
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "context", "tensor")}
        require_positive("mesh", "slices", self.slices)
        for axis, size in sizes.items():
            if size != -1:
                require_positive("mesh", axis, size)
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh={sizes}: only one axis can be -1 (all devices that are left)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultihostConfig:
    """Group `multihost`."""

    initialization_timeout_seconds: int
    heartbeat_timeout_seconds: int
    barrier_timeout_seconds: int
    watchdog_seconds: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            require_positive("multihost", name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Group `checkpoint`."""

    every_steps: int
    keep: int
    keep_every_steps: int | None
    keep_best: str | None
    keep_best_mode: Literal["min", "max"]
    verify: Literal["checksums", "sizes"]
    max_failed_saves: int
    init_from: str | None

    def __post_init__(self):
        for name in ("every_steps", "keep", "max_failed_saves"):
            require_positive("checkpoint", name, getattr(self, name))
        if self.keep_every_steps is not None:
            require_positive("checkpoint", "keep_every_steps", self.keep_every_steps)
        if self.keep_best is not None and self.keep_best.count("/") != 1:
            raise UserError(f"checkpoint.keep_best={self.keep_best!r}: write SUITE/NUMBER, such as loss/loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Group `guards`."""

    on_bad_steps: Literal["rewind", "stop"]
    max_skipped: int
    skip_steps: int
    max_rewinds: int
    spike_threshold: float | None
    spike_window_steps: int
    spike_patience_steps: int

    def __post_init__(self):
        for name in ("max_skipped", "spike_window_steps", "spike_patience_steps"):
            require_positive("guards", name, getattr(self, name))
        for name in ("skip_steps", "max_rewinds"):
            require_not_negative("guards", name, getattr(self, name))
        if self.spike_threshold is not None:
            require_positive("guards", "spike_threshold", self.spike_threshold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Group `logging`."""

    every_steps: int
    tensorboard: bool
    wandb_project: str | None

    def __post_init__(self):
        require_positive("logging", "every_steps", self.every_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    multihost: MultihostConfig
    checkpoint: CheckpointConfig
    guards: GuardsConfig
    eval: EvalConfig
    logging: LoggingConfig

    def __post_init__(self):
        rows, rest = divmod(self.train.global_batch_tokens, self.data.sequence_length)
        if rest or rows % self.train.accumulation:
            unit = self.data.sequence_length * self.train.accumulation
            raise UserError(
                f"train.global_batch_tokens={self.train.global_batch_tokens} is not a multiple of data.sequence_length "
                f"× train.accumulation = {unit}; use {max(1, round(self.train.global_batch_tokens / unit)) * unit}"
            )
        if self.optimizer.warmup_steps >= self.train.steps:
            raise UserError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} leaves nothing of train.steps={self.train.steps}"
                f"; set it to half of train.steps, {self.train.steps // 2}, or raise train.steps to "
                f"{2 * self.optimizer.warmup_steps}"
            )
        if self.model.top_k is not None and self.model.top_k > self.data.sequence_length:
            raise UserError(
                f"model.top_k={self.model.top_k} is more than data.sequence_length={self.data.sequence_length}: "
                "it would keep every key; use less"
            )
        self._check_keep_best()
        paths = [self.data.path, *(source.path for source in self.data.sources)]
        is_synthetic = any(path is not None and path.startswith(SYNTHETIC) for path in paths)
        if is_synthetic and self.data.synthetic.vocab_size > self.model.vocab_size:
            raise UserError(
                f"data.synthetic.vocab_size={self.data.synthetic.vocab_size} is more than "
                f"model.vocab_size={self.model.vocab_size}; use at most that"
            )

    def _check_keep_best(self) -> None:
        """Refuse what would never find a number to compare."""
        if self.checkpoint.keep_best is None:
            return
        suite = self.checkpoint.keep_best.split("/")[0]
        if suite not in self.eval.suites:
            raise UserError(
                f"checkpoint.keep_best={self.checkpoint.keep_best!r}: {suite} is not one of eval.suites="
                f"{self.eval.suites}; add it there"
            )
        if self.checkpoint.every_steps % self.eval.every_steps:
            raise UserError(
                f"eval.every_steps={self.eval.every_steps} does not divide checkpoint.every_steps="
                f"{self.checkpoint.every_steps}, so checkpoint.keep_best has nothing to compare; use a divisor"
            )

    @property
    def batch_rows(self) -> int:
        """Rows of an update, over all devices and microbatches."""
        return self.train.global_batch_tokens // self.data.sequence_length

    def to_json(self) -> str:
        """Return the config as indented JSON, the text of `config.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"
