"""Config group `eval`."""

import re
import urllib.parse
from typing import Annotated, Literal, get_args

from difftx.config.architectures import Granularity
from difftx.config.checks import require_distinct_names
from difftx.config.fields import Entries, Extensible, Fraction, Group, NotNegative, Positive, Rule, Seed, Share, Unique
from difftx.errors import UserError

Bits = Annotated[int, Rule(lambda bits: 2 <= bits <= 16, " must lie in 2 … 16")]
Initialization = Literal["as_configured", "no_scale", "no_norm", "no_scale_no_norm", "counterpart"]
Order = Literal["random", "alternating"]
HARNESS_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
KINDS = "summarisation", "question_answering"
MathFormat = Literal["gsm8k", "math", "svamp", "asdiv", "mawps", "carp", "tabmwp", "college_math"]


class NeedleCaseConfig(Group):
    """Numbers of hidden and queried needles, an entry of `eval.needle.cases`."""

    needles: int
    """Needles hidden in a prompt."""
    queries: int
    """Needles that the prompt asks for."""


class NeedleConfig(Group, path="eval.needle"):
    """Suite needle: retrieval of magic numbers of cities that are hidden in a long text (§3.4)."""

    cases: Entries[tuple[NeedleCaseConfig, ...]] = tuple(
        NeedleCaseConfig(needles=n, queries=q) for n, q in ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1))
    )
    """Numbers of hidden needles and of queries; the defaults are those of Table 2, and 8 and 1 of Figure 5."""
    lengths: Unique[tuple[Positive[int], ...]] = ()
    """Tokens of prompt and answer, such as (8192, 16384); (): `data.sequence_length`."""
    depths: Entries[tuple[Share, ...]] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the queried needles, as shares of the haystack."""
    samples: Positive[int] = 50
    """Prompts per case, length and depth."""
    new_tokens: Positive[int] = 32
    """Largest number of tokens of an answer."""
    haystack: str | None = None
    """Text that hides the needles: a path written as for `data.path` (of a store, its validation split). None: the
    run's first validation set of text."""
    seed: Seed = 0
    """Seed of cities, numbers, positions and haystacks, below 2**32."""

    def __post_init__(self):
        super().__post_init__()
        for i, case in enumerate(self.cases):
            if not 1 <= case.queries <= case.needles:
                raise UserError(
                    f"eval.needle.cases[{i}]: queries={case.queries} must lie in 1 … needles={case.needles}"
                )


class IclTaskConfig(Group):
    """A classification task, an entry of `eval.icl.tasks`: two files of JSON lines (plain, .gz, .zst or .xz)."""

    name: str
    """Name of the task in the results."""
    train: str
    """Path of the demonstrations."""
    test: str
    """Path of the questions."""
    text: str
    """Field of the text."""
    label: str
    """Field of the label."""
    text_word: str
    """Word before the text in a prompt, such as "Question"."""
    label_word: str
    """Word before the label in a prompt, such as "Type"."""


class IclConfig(Group, path="eval.icl"):
    """Suite icl: classification from demonstrations in the prompt (§3.5)."""

    tasks: tuple[IclTaskConfig, ...] = ()
    """The tasks: ({"name": "trec", "train": "trec_train.jsonl", "test": "trec_test.jsonl", "text": "text", "label":
    "coarse", "text_word": "Question", "label_word": "Type"}, …)."""
    shots: tuple[Positive[int], ...] = ()
    """Numbers of demonstrations; (): 1, 2, 4, … and as many as the context holds."""
    questions: Positive[int] = 250
    """Largest number of questions per task."""
    orders: Entries[tuple[Order, ...]] = get_args(Order)
    """Orders of demonstrations: "random", or "alternating" with one of each class in turn."""
    permutations: Positive[int] = 10
    """Different permutations of the same demonstrations, in each order; all of them where there are fewer."""
    seed: Seed = 0
    """Seed of demonstrations, questions and permutations, below 2**32."""

    def __post_init__(self):
        super().__post_init__()
        require_distinct_names("eval.icl.tasks", [task.name for task in self.tasks])


class HallucinationSetConfig(Group):
    """A set of documents, an entry of `eval.hallucination.sets`: a file of JSON lines (plain, .gz, .zst or .xz)."""

    name: str
    """Name of the set in the results."""
    path: str
    """Path of the file."""
    kind: Literal["summarisation", "question_answering"]
    """Task of the set."""
    document: str
    """Field of the document: a text, a list of texts, or HotpotQA's titles and sentences."""
    question: str | None
    """Field of the question; null for summarisation."""
    answers: str
    """Field of the reference answers: a text or a list of texts."""
    new_tokens: int
    """Largest number of tokens of an answer."""


class HallucinationConfig(Group, path="eval.hallucination"):
    """Suite hallucination: answers about a document that the prompt contains (§3.6, Table 4)."""

    sets: tuple[HallucinationSetConfig, ...] = ()
    """The sets, with the names of their fields, here LongBench's: ({"name": "hotpotqa", "path": "hotpotqa.jsonl",
    "kind": "question_answering", "document": "context", "question": "input", "answers": "answers", "new_tokens": 32},
    …)."""
    samples: Positive[int] = 100
    """Largest number of samples per set."""
    long_documents: Literal["cut_middle", "refuse"] = "cut_middle"
    """What happens to a document that the context cannot hold. "cut_middle": its first and last tokens are kept, as in
    LongBench; "refuse": the suite ends with an error."""
    judge_model: str | None = None
    """Model at `eval.judge.base_url` that judges the answers, such as "gpt-4o-2024-08-06". None: the offline judge,
    which compares words."""
    judge_temperature: NotNegative[float] | None = 0.0
    """Sampling temperature of the judge; None: the endpoint's own, since some models accept no other."""
    support_words: Positive[int] = 2
    """Offline judge: length in words of the runs that it looks for in the document and the references."""
    support_threshold: Share = 0.5
    """Offline judge: share of a summary's runs that must be found for the summary to be right."""
    seed: Seed = 0
    """Seed of the samples, below 2**32."""

    def __post_init__(self):
        super().__post_init__()
        require_distinct_names("eval.hallucination.sets", [one.name for one in self.sets])
        for one in self.sets:
            where = f"eval.hallucination.sets, {one.name}"
            if one.name in KINDS:
                raise UserError(f"{where}: means over the sets of a kind have this name; give the set another")
            if one.new_tokens <= 0:
                raise UserError(f"{where}.new_tokens={one.new_tokens} must be positive")
            if (one.question is None) == (one.kind == "question_answering"):
                raise UserError(
                    f"{where}: question={one.question!r} with kind={one.kind!r}; name the field of the questions for "
                    "question_answering, and write null for summarisation"
                )
        if self.judge_model == "":
            raise UserError("eval.hallucination.judge_model='': name a model, or write none for the offline judge")


class JudgeConfig(Group, path="eval.judge"):
    """Access to `eval.hallucination.judge_model`; results do not depend on it."""

    base_url: str = "https://api.openai.com/v1"
    """Address of an endpoint for chat completions; with a key: https, or http to this machine."""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; its name ends in _KEY or _TOKEN. None: no key."""
    concurrency: Positive[int] = 4
    """Requests in flight."""
    requests_per_minute: Positive[float] | None = None
    """Largest rate over all requests; None: only the endpoint's own limit."""
    timeout_seconds: Positive[float] = 120.0
    """Time for a whole request, until its response is complete."""
    attempts: Positive[int] = 8
    """Attempts per verdict."""
    backoff_seconds: Positive[float] = 1.0
    """Wait after the first failed attempt; it doubles after each further one."""
    longest_wait_seconds: Positive[float] = 120.0
    """Longest wait; an endpoint that asks for a longer one ends the suite."""
    usd_per_million_tokens_in: NotNegative[float] | None = None
    """Price of prompt tokens; None: no cost is printed."""
    usd_per_million_tokens_out: NotNegative[float] | None = None
    """Price of generated tokens; None: no cost is printed."""

    def __post_init__(self):
        super().__post_init__()
        if (self.usd_per_million_tokens_in is None) != (self.usd_per_million_tokens_out is None):
            raise UserError(
                "eval.judge.usd_per_million_tokens_in and usd_per_million_tokens_out belong together; set both or none"
            )
        # The messages omit the values, which may be keys that the user wrote into the wrong field.
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


class AttentionConfig(Group, path="eval.attention"):
    """Suite attention: attention weights of the last token of needle prompts (Table 3, Figure 1).

    The suite uses `depths`, `haystack`, `new_tokens` and `seed` of `eval.needle`.
    """

    needles: int = 2
    """Needles hidden in a prompt."""
    queries: int = 1
    """Needles that the prompt asks for: the answer."""
    length: Positive[int] | None = None
    """Tokens of prompt and answer; None: `data.sequence_length`."""
    samples: Positive[int] = 20
    """Prompts per depth."""
    layers: Unique[tuple[Positive[int], ...]] = ()
    """Layers, from 1, over which numbers, table and drawn maps are averaged; (): all."""
    l0_share: Fraction = 1e-3
    """The pseudo-ℓ0 norm counts the entries above this share of their row's sum of |A|."""
    shown_queries: Positive[int] = 8
    """Rows of the map that is drawn: the last tokens of one prompt."""

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.queries <= self.needles:
            raise UserError(f"eval.attention.queries={self.queries} must lie in 1 … needles={self.needles}")


class OutliersConfig(Group, path="eval.outliers"):
    """Suite outliers: magnitudes of attention logits and hidden states (Table 5)."""

    tokens: Positive[int] = 400_000
    """Largest number of tokens of each validation set; the suite reads them twice."""
    ranks: Entries[tuple[Positive[int], ...]] = (1, 2, 3, 10, 100)
    """Ranks among all magnitudes that are reported; 1 is the largest."""


class QuantizeConfig(Group, path="eval.quantize"):
    """Suite quantize: other suites with quantised attention logits (Figure 8)."""

    bits: Entries[tuple[Bits, ...]] = (16, 8, 6, 4)
    """Numbers of bits, 2 to 16; 16 is not quantised, as in the figure."""
    granularity: Granularity = "query"
    """Used in place of `model.attention_logit_granularity`."""
    suites: Entries[tuple[str, ...]] = ("loss",)
    """Suites to run, with their own settings."""


class GradientsConfig(Group, path="eval.gradients"):
    """Suite gradients: gradient norms by matrix and layer (Appendix F)."""

    tokens: Positive[int] = 65_536
    """Largest number of tokens of each validation set per gradient."""
    at_initialization: Unique[tuple[Initialization, ...]] = get_args(Initialization)
    """Initial models of the same seed to measure too. "as_configured"; "no_scale": without the factor 1 - λ_init;
    "no_norm": without the head norm; "no_scale_no_norm": without both; "counterpart": the Transformer that matches a
    diff model, and vice versa. All have `model.zero_init_output` = False."""


class HarnessConfig(Group, path="eval.harness"):
    """Suite harness: tasks of EleutherAI's lm-eval (Tables 1 and 8; extra "eval")."""

    tasks: Entries[tuple[str, ...]] = HARNESS_TASKS
    """Tasks and groups of lm-eval, as `lm-eval ls tasks` lists them; the defaults are the paper's."""
    num_fewshot: NotNegative[int] | None = None
    """Examples in a prompt; None: the task's own number, 0 for the default tasks."""
    limit: Positive[int] | None = None
    """Number of questions per task, from the first; None: all."""
    data_path: str | None = None
    """Folder of JSON lines for the default tasks: arc_challenge_test.jsonl, arc_easy_test, boolq_val, hellaswag_val,
    openbookqa_test, piqa_val, winogrande_val and, for examples, <task>_train (plain, .gz, .zst or .xz; fields in
    `difftx/evals/harness/data.py`). None: the Hugging Face hub."""
    include_path: str | None = None
    """Folder of lm-eval YAML files that define further tasks."""
    truncate: bool = False
    """Whether a request longer than the context loses its left end, as in lm-eval's own models, and is counted; False:
    it is an error."""
    seed: Seed = 1234
    """Seed of the examples in prompts and of samples, below 2**32."""


class MathTaskConfig(Group):
    """A task, an entry of `eval.math.tasks`: files of JSON lines with the fields of a published format."""

    name: str
    """Name of the task in the results."""
    format: MathFormat
    """Format of the test file (`difftx/evals/math/formats.py`)."""
    test: str
    """Path of the problems."""
    train: str | None
    """Path of the demonstrations; null: none."""
    train_format: MathFormat | None
    """Format of the demonstrations; null: `format`."""


class MathConfig(Group, path="eval.math"):
    """Suite math: word problems with free-form answers (ICLR camera-ready, appendix C; extra "eval")."""

    tasks: tuple[MathTaskConfig, ...] = ()
    """The tasks: ({"name": "gsm8k", "format": "gsm8k", "test": "gsm8k_test.jsonl", "train": "gsm8k_train.jsonl",
    "train_format": None}, …)."""
    shots: NotNegative[int] = 4
    """Demonstrations in a prompt, the same for all questions; 0: none."""
    chain_of_thought: bool = True
    """Whether demonstrations include their solutions, or, without demonstrations, the prompt asks for steps."""
    questions: Positive[int] | None = None
    """Questions per task, drawn by the seed; None: all."""
    new_tokens: Positive[int] = 16_384
    """Largest number of tokens of an answer, as far as the context holds them."""
    temperature: NotNegative[float] = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    seed: Seed = 0
    """Seed of demonstrations, questions and samples, below 2**32."""

    def __post_init__(self):
        super().__post_init__()
        require_distinct_names("eval.math.tasks", [task.name for task in self.tasks])
        for task in self.tasks:
            if self.shots and task.train is None:
                raise UserError(
                    f"eval.math.tasks, task {task.name!r}: eval.math.shots={self.shots} demonstrations need a file, "
                    "train; name it, or use eval.math.shots=0"
                )


class EvalConfig(Extensible, path="eval"):
    """Evaluation during training, and the settings of every suite."""

    every_steps: Positive[int] = 1000
    """Steps between evaluations in the training loop; the last step is always evaluated."""
    suites: tuple[str, ...] = ("loss",)
    """Suites that the training loop runs; `python eval.py --list` prints them."""
    loss_tokens: Positive[int] = 1_048_576
    """Suites loss and recall: largest number of tokens of each validation set."""
    recall_max_bigram_count: NotNegative[int] = 1250
    """Suite recall: a bigram that occurs more often in the training data is memorised and is not an AR-Hit
    (Zoology)."""
    bigrams_path: str | None = None
    """Suite recall: a file written by `difftx data bigrams`; None: bigrams are counted at start-up, if the run
    tokenises its own text."""
    position_documents: Positive[int] = 256
    """Suite position: largest number of long documents of each validation set."""
    throughput_rounds: Positive[int] = 5
    """Suite throughput: turns of each model; the median counts."""
    throughput_steps: Positive[int] = 10
    """Suite throughput: batches per turn."""
    sample_tokens: Positive[int] = 200
    """Suite sample: new tokens per prompt."""
    sample_temperature: NotNegative[float] = 0.8
    """Suite sample: sampling temperature; 0 takes the most likely token."""
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


def _is_plain_url(text: str) -> bool:
    try:
        url = urllib.parse.urlsplit(text)
        port_fits = url.port is None or url.port > 0
    except ValueError:  # For example, the port is not a number, or a bracket is not closed.
        return False
    plain = not (url.username or url.password or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.hostname) and port_fits and plain and text.isprintable()
