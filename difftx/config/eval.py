"""Group `eval` of a config."""

import dataclasses
import re
import urllib.parse
from typing import Literal

from difftx.config.architectures import Granularity
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


KINDS = "summarisation", "question_answering"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HallucinationSetConfig:
    """An entry of `eval.hallucination.sets`."""

    name: str
    path: str
    kind: Literal["summarisation", "question_answering"]
    document: str
    question: str | None
    answers: str
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HallucinationConfig:
    """Group `eval.hallucination`."""

    sets: tuple[HallucinationSetConfig, ...]
    samples: int
    long_documents: Literal["cut_middle", "refuse"]
    judge_model: str | None
    judge_temperature: float | None
    support_words: int
    support_threshold: float
    seed: int

    def __post_init__(self):
        for name in ("samples", "support_words"):
            require_positive("eval.hallucination", name, getattr(self, name))
        require_distinct_names("eval.hallucination.sets", [one.name for one in self.sets])
        for one in self.sets:
            where = f"eval.hallucination.sets, {one.name}"
            if one.name in KINDS:
                raise UserError(f"{where}: means over the sets of a kind have this name; give the set another")
            require_positive(where, "new_tokens", one.new_tokens)
            if (one.question is None) == (one.kind == "question_answering"):
                raise UserError(
                    f"{where}: question={one.question!r} with kind={one.kind!r}; name the field of the questions for "
                    "question_answering, and write null for summarisation"
                )
        if self.judge_model == "":
            raise UserError("eval.hallucination.judge_model='': name a model, or write none for the offline judge")
        if self.judge_temperature is not None and not 0 <= self.judge_temperature < float("inf"):
            raise UserError(f"eval.hallucination.judge_temperature={self.judge_temperature} must not be negative")
        if not 0 <= self.support_threshold <= 1:
            raise UserError(f"eval.hallucination.support_threshold={self.support_threshold} must lie in 0 … 1, a share")
        require_seed("eval.hallucination", self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Group `eval.judge`."""

    base_url: str
    key_variable: str | None
    concurrency: int
    requests_per_minute: float | None
    timeout_seconds: float
    attempts: int
    backoff_seconds: float
    longest_wait_seconds: float
    usd_per_million_tokens_in: float | None
    usd_per_million_tokens_out: float | None

    def __post_init__(self):
        for name in ("concurrency", "timeout_seconds", "attempts", "backoff_seconds", "longest_wait_seconds"):
            require_positive("eval.judge", name, getattr(self, name))
        if self.requests_per_minute is not None:
            require_positive("eval.judge", "requests_per_minute", self.requests_per_minute)
        for name in ("usd_per_million_tokens_in", "usd_per_million_tokens_out"):
            if (price := getattr(self, name)) is not None and not 0 <= price < float("inf"):
                raise UserError(f"eval.judge.{name}={price} must not be negative")
        if (self.usd_per_million_tokens_in is None) != (self.usd_per_million_tokens_out is None):
            raise UserError(
                "eval.judge.usd_per_million_tokens_in and usd_per_million_tokens_out belong together; set both or none"
            )
        # Neither message repeats what may be a key that was written to the wrong place.
        if self.key_variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_variable):
            raise UserError(
                "eval.judge.key_variable is not the name of an environment variable, such as OPENAI_API_KEY; the key "
                "itself belongs into that variable"
            )
        if not _is_plain_url(self.base_url):
            raise UserError(
                "eval.judge.base_url must be an http or https address without user, password or query, such as "
                "https://api.openai.com/v1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Group `eval.attention`."""

    needles: int
    queries: int
    length: int | None
    samples: int
    layers: tuple[int, ...]
    l0_share: float
    shown_queries: int

    def __post_init__(self):
        for name in ("samples", "shown_queries"):
            require_positive("eval.attention", name, getattr(self, name))
        if self.length is not None:
            require_positive("eval.attention", "length", self.length)
        if not 1 <= self.queries <= self.needles:
            raise UserError(f"eval.attention.queries={self.queries} must lie in 1 … needles={self.needles}")
        if len(set(self.layers)) < len(self.layers) or any(layer < 1 for layer in self.layers):
            raise UserError(f"eval.attention.layers={self.layers}: different layers, from 1 on; (): all")
        if not 0 <= self.l0_share < 1:
            raise UserError(f"eval.attention.l0_share={self.l0_share} must lie in 0 … 1, a share of a row's mass")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutliersConfig:
    """Group `eval.outliers`."""

    tokens: int
    ranks: tuple[int, ...]

    def __post_init__(self):
        require_positive("eval.outliers", "tokens", self.tokens)
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise UserError(f"eval.outliers.ranks={self.ranks}: give one at least, and each once")
        for rank in self.ranks:
            require_positive("eval.outliers", "ranks", rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Group `eval.quantize`."""

    bits: tuple[int, ...]
    granularity: Granularity
    suites: tuple[str, ...]

    def __post_init__(self):
        for name in ("bits", "suites"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"eval.quantize.{name}={values}: give one at least, and each once")
        for bits in self.bits:
            if not 2 <= bits <= 16:
                raise UserError(f"eval.quantize.bits={self.bits}: {bits} must lie in 2 … 16; 16 is not quantised")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """Group `eval.gradients`."""

    tokens: int
    at_initialization: tuple[Literal["as_configured", "no_scale", "no_norm", "no_scale_no_norm", "counterpart"], ...]

    def __post_init__(self):
        require_positive("eval.gradients", "tokens", self.tokens)
        if len(set(self.at_initialization)) < len(self.at_initialization):
            raise UserError(f"eval.gradients.at_initialization={self.at_initialization}: give each once")


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
    attention: AttentionConfig
    outliers: OutliersConfig
    quantize: QuantizeConfig
    gradients: GradientsConfig
    hallucination: HallucinationConfig
    judge: JudgeConfig
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


def _is_plain_url(text: str) -> bool:
    try:
        url = urllib.parse.urlsplit(text)
        port_fits = url.port is None or url.port > 0
    except ValueError:  # A port that is no number, brackets that do not close.
        return False
    plain = not (url.username or url.password or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.hostname) and port_fits and plain and text.isprintable()
