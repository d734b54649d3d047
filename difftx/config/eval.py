"""Group `eval` of a config."""

import dataclasses
from typing import Literal

from difftx.config.checks import require_distinct_names, require_positive, require_seed
from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleCaseConfig:
    """An entry of `eval.needle.cases`."""

    needles: int
    queries: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Group `eval.needle`."""

    cases: tuple[NeedleCaseConfig, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    new_tokens: int
    haystack: str | None
    seed: int

    def __post_init__(self):
        for name in ("samples", "new_tokens"):
            require_positive("eval.needle", name, getattr(self, name))
        for name in ("cases", "depths"):
            if not getattr(self, name):
                raise UserError(f"eval.needle.{name} is empty; give one at least, as configs/base.py does")
        for name in ("cases", "lengths", "depths"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise UserError(f"eval.needle.{name}={values}: they must differ")
        for i, case in enumerate(self.cases):
            if not 1 <= case.queries <= case.needles:
                raise UserError(
                    f"eval.needle.cases[{i}]: queries={case.queries} must lie in 1 … needles={case.needles}"
                )
        for length in self.lengths:
            require_positive("eval.needle", "lengths", length)
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(f"eval.needle.depths={self.depths}: {depth} must lie in 0 … 1, shares of the haystack")
        require_seed("eval.needle", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IclTaskConfig:
    """An entry of `eval.icl.tasks`."""

    name: str
    train: str
    test: str
    text: str
    label: str
    text_word: str
    label_word: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class IclConfig:
    """Group `eval.icl`."""

    tasks: tuple[IclTaskConfig, ...]
    shots: tuple[int, ...]
    questions: int
    orders: tuple[Literal["random", "alternating"], ...]
    permutations: int
    seed: int

    def __post_init__(self):
        for name in ("questions", "permutations"):
            require_positive("eval.icl", name, getattr(self, name))
        for count in self.shots:
            require_positive("eval.icl", "shots", count)
        if not self.orders or len(set(self.orders)) < len(self.orders):
            raise UserError(f"eval.icl.orders={self.orders}: give 'random', 'alternating' or both")
        require_distinct_names("eval.icl.tasks", [task.name for task in self.tasks])
        require_seed("eval.icl", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Group `eval.harness`."""

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: int | None
    data_path: str | None
    include_path: str | None
    truncate: bool
    seed: int

    def __post_init__(self):
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"eval.harness.tasks={self.tasks}: name one at least, and each once")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"eval.harness.num_fewshot={self.num_fewshot} must not be negative")
        if self.limit is not None:
            require_positive("eval.harness", "limit", self.limit)
        require_seed("eval.harness", self.seed)


MathFormat = Literal["gsm8k", "math", "svamp", "asdiv", "mawps", "carp", "tabmwp", "college_math"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathTaskConfig:
    """An entry of `eval.math.tasks`."""

    name: str
    format: MathFormat
    test: str
    train: str | None
    train_format: MathFormat | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathConfig:
    """Group `eval.math`."""

    tasks: tuple[MathTaskConfig, ...]
    shots: int
    chain_of_thought: bool
    questions: int | None
    new_tokens: int
    temperature: float
    seed: int

    def __post_init__(self):
        require_positive("eval.math", "new_tokens", self.new_tokens)
        if self.questions is not None:
            require_positive("eval.math", "questions", self.questions)
        for name in ("shots", "temperature"):
            if getattr(self, name) < 0:
                raise UserError(f"eval.math.{name}={getattr(self, name)} must not be negative")
        require_distinct_names("eval.math.tasks", [task.name for task in self.tasks])
        for task in self.tasks:
            if self.shots and task.train is None:
                raise UserError(
                    f"eval.math.tasks, task {task.name!r}: eval.math.shots={self.shots} demonstrations need a file, "
                    "train; name it, or use eval.math.shots=0"
                )
        require_seed("eval.math", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Group `eval`."""

    every_steps: int
    suites: tuple[str, ...]
    loss_tokens: int
    recall_max_bigram_count: int
    bigrams_path: str | None
    position_documents: int
    throughput_rounds: int
    throughput_steps: int
    sample_tokens: int
    sample_temperature: float
    needle: NeedleConfig
    icl: IclConfig
    harness: HarnessConfig
    math: MathConfig

    def __post_init__(self):
        for name in (
            "every_steps",
            "loss_tokens",
            "position_documents",
            "throughput_rounds",
            "throughput_steps",
            "sample_tokens",
        ):
            require_positive("eval", name, getattr(self, name))
        if self.recall_max_bigram_count < 0:
            raise UserError(f"eval.recall_max_bigram_count={self.recall_max_bigram_count} must not be negative")
        if self.sample_temperature < 0:
            raise UserError(f"eval.sample_temperature={self.sample_temperature} must not be negative")
