"""Config group `eval`."""

import re
from typing import Annotated, Literal, get_args

from difftx.config import affects, fields, flag
from difftx.config.checks import require_distinct_names
from difftx.config.fields import Group, NonEmptyUnique, NotNegative, Positive, Seed, Unique, UnitClosed, UnitHalfOpen
from difftx.config.model import ChunkTokens, FewBits, Granularity
from difftx.errors import UserError

Bits = Annotated[int, fields.Rule(lambda bits: 2 <= bits <= 16, " must lie in 2 … 16")]
Initialization = Literal["as_configured", "no_scale", "no_norm", "no_scale_no_norm", "counterpart"]
RoundedProducts = Literal["int8_weights", "int4_weights", "int8", "int8_static", "fp8", "fp8_static"]
TestSuite = Literal["loss", "recall", "position"]
Order = Literal["random", "alternating"]
HARNESS_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
Kind = Literal["summarisation", "question_answering"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MathFormat = Literal["gsm8k", "math", "svamp", "asdiv", "mawps", "carp", "tabmwp", "college_math"]


class NeedleCaseConfig(Group):
    """An entry of `eval.needle.cases`: how many needles a prompt hides, and how many it asks for."""

    needles: affects.Evaluation[int]
    """Number of needles that are hidden in a prompt."""
    queries: affects.Evaluation[int]
    """Number of needles that the prompt asks for."""


class NeedleConfig(Group):
    """Settings of suite `needle`: retrieve the magic numbers of cities from a long text (§3.4 of the paper)."""

    cases: affects.Evaluation[NonEmptyUnique[tuple[NeedleCaseConfig, ...]]] = tuple(
        NeedleCaseConfig(needles=n, queries=q) for n, q in ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1))
    )
    """Numbers of hidden needles and of queries. The defaults are from Table 2 and, for 8 needles, from Figure 5."""
    lengths: affects.Evaluation[Unique[tuple[Positive[int], ...]]] = ()
    """Numbers of tokens of prompt and answer together, such as (8192, 16384). (): `data.sequence_length`."""
    depths: affects.Evaluation[NonEmptyUnique[tuple[UnitClosed, ...]]] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the queried needles in the haystack, from 0 (start) to 1 (end)."""
    samples: affects.Evaluation[Positive[int]] = 50
    """Number of prompts per case, length and depth."""
    new_tokens: affects.Evaluation[Positive[int]] = 32
    """Largest number of tokens in an answer."""
    haystack: flag.Bucket[flag.Location[affects.Evaluation[str | None]]] = None
    """Path of the text that hides the needles, in the format of `data.path`. For a store, its validation split. None:
    the run's first validation set of text."""
    seed: affects.Evaluation[Seed] = 0
    """Random seed of cities, numbers, positions and haystacks, below 2**32."""

    def __post_init__(self):
        for i, case in enumerate(self.cases):
            if not 1 <= case.queries <= case.needles:
                raise UserError(
                    f"eval.needle.cases[{i}]: queries={case.queries} must lie in 1 … needles={case.needles}"
                )


class IclTaskConfig(Group):
    """An entry of `eval.icl.tasks`: a classification task in two files of JSON lines (plain, .gz, .zst or .xz)."""

    name: affects.Evaluation[str]
    """Name of the task in the results."""
    train: flag.Bucket[flag.Location[affects.Evaluation[str]]]
    """Path of the file with the demonstrations."""
    test: flag.Bucket[flag.Location[affects.Evaluation[str]]]
    """Path of the file with the questions."""
    text: affects.Evaluation[str]
    """Name of the JSON field with the text."""
    label: affects.Evaluation[str]
    """Name of the JSON field with the label."""
    text_word: affects.Evaluation[str]
    """Word that precedes the text in a prompt, such as "Question"."""
    label_word: affects.Evaluation[str]
    """Word that precedes the label in a prompt, such as "Type"."""


class IclConfig(Group):
    """Settings of suite `icl`: classification from demonstrations in the prompt (§3.5 of the paper)."""

    tasks: affects.Evaluation[tuple[IclTaskConfig, ...]] = ()
    """Classification tasks: ({"name": "trec", "train": "trec_train.jsonl", "test": "trec_test.jsonl", "text": "text",
    "label": "coarse", "text_word": "Question", "label_word": "Type"}, …)."""
    shots: affects.Evaluation[tuple[Positive[int], ...]] = ()
    """Numbers of demonstrations. (): 1, 2, 4, …, and as many as the context holds."""
    questions: affects.Evaluation[Positive[int]] = 250
    """Largest number of questions per task."""
    orders: affects.Evaluation[NonEmptyUnique[tuple[Order, ...]]] = get_args(Order)
    """Orders of demonstrations. "random": random order. "alternating": one of each class in turn."""
    permutations: affects.Evaluation[Positive[int]] = 10
    """Largest number of permutations of the same demonstrations, in each order."""
    seed: affects.Evaluation[Seed] = 0
    """Random seed of demonstrations, questions and permutations, below 2**32."""

    def __post_init__(self):
        require_distinct_names("eval.icl.tasks", [task.name for task in self.tasks])


class HallucinationSetConfig(Group):
    """An entry of `eval.hallucination.sets`: documents in a file of JSON lines (plain, .gz, .zst or .xz)."""

    name: affects.Evaluation[str]
    """Name of the set in the results."""
    path: flag.Bucket[flag.Location[affects.Evaluation[str]]]
    """Path of the file."""
    kind: affects.Evaluation[Kind]
    """Task for the documents of the set."""
    document: affects.Evaluation[str]
    """Name of the JSON field with the document: a text, a list of texts, or HotpotQA's titles and sentences."""
    question: affects.Evaluation[str | None]
    """Name of the JSON field with the question, or null for summarisation."""
    answers: affects.Evaluation[str]
    """Name of the JSON field with the reference answers: a text or a list of texts."""
    new_tokens: affects.Evaluation[Positive[int]]
    """Largest number of tokens in an answer."""


class HallucinationConfig(Group):
    """Settings of suite `hallucination`: answers about a document in the prompt (§3.6 and Table 4 of the paper)."""

    sets: affects.Evaluation[tuple[HallucinationSetConfig, ...]] = ()
    """Sets of documents, such as those of LongBench: ({"name": "hotpotqa", "path": "hotpotqa.jsonl", "kind":
    "question_answering", "document": "context", "question": "input", "answers": "answers", "new_tokens": 32}, …)."""
    samples: affects.Evaluation[Positive[int]] = 100
    """Largest number of samples per set."""
    judge_model: affects.Evaluation[str | None] = None
    """Model at `eval.judge.base_url` that judges the answers, such as "gpt-4o-2024-08-06". None: the offline judge,
    which compares words."""
    judge_temperature: affects.Evaluation[NotNegative[float] | None] = 0.0
    """Sampling temperature of the judge. None: the endpoint's default. Some models accept only the default."""
    support_words: affects.Evaluation[Positive[int]] = 2
    """Offline judge: number of words in each word sequence that it looks up in the document and the references."""
    support_threshold: affects.Evaluation[UnitClosed] = 0.5
    """Offline judge: share of the word sequences of a summary that must be found for the summary to be correct."""
    seed: affects.Evaluation[Seed] = 0
    """Random seed of the samples, below 2**32."""

    def __post_init__(self):
        require_distinct_names("eval.hallucination.sets", [one.name for one in self.sets])
        for one in self.sets:
            where = f"eval.hallucination.sets, {one.name}"
            if one.name in KINDS:
                raise UserError(f"{where}: means over the sets of a kind have this name; give the set another")
            if (one.question is None) == (one.kind == "question_answering"):
                raise UserError(
                    f"{where}: question={one.question!r} with kind={one.kind!r}; name the field of the questions for "
                    "question_answering, and write null for summarisation"
                )


class JudgeConfig(Group):
    """Access to the model `eval.hallucination.judge_model`. Of these fields, only `base_url` affects the results."""

    base_url: affects.Evaluation[str] = "https://api.openai.com/v1"
    """Address of an endpoint for chat completions. With a key, it must be https, or http to this machine."""
    key_variable: affects.Nothing[str | None] = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key. The name must end in _KEY or _TOKEN. None: no key."""
    concurrency: affects.Nothing[Positive[int]] = 4
    """Largest number of simultaneous requests."""
    timeout_seconds: affects.Nothing[Positive[float]] = 120.0
    """Time limit for a request, until its response is complete."""
    attempts: affects.Nothing[Positive[int]] = 8
    """Largest number of attempts to get a verdict."""

    def __post_init__(self):
        # The messages do not show the values, because the user may have written a key into the wrong field.
        if self.key_variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_variable):
            raise UserError(
                "eval.judge.key_variable is not the name of an environment variable, such as OPENAI_API_KEY; the key "
                "itself belongs into that variable"
            )
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", self.base_url):
            raise UserError(
                "eval.judge.base_url must be an http or https address without user, password or query, such as "
                "https://api.openai.com/v1"
            )


class AttentionConfig(Group):
    """Settings of suite `attention`: how much the last token of a needle prompt attends to the answer (paper, Table 3).

    The suite uses `depths`, `haystack`, `new_tokens` and `seed` of `eval.needle`.
    """

    needles: affects.Evaluation[int] = 2
    """Number of needles that are hidden in a prompt."""
    queries: affects.Evaluation[int] = 1
    """Number of needles that the prompt asks for, and that count as the answer."""
    length: affects.Evaluation[Positive[int] | None] = None
    """Number of tokens of prompt and answer together. None: `data.sequence_length`."""
    samples: affects.Evaluation[Positive[int]] = 20
    """Number of prompts per depth."""
    layers: affects.Evaluation[Unique[tuple[Positive[int], ...]]] = ()
    """Layers, numbered from 1, over which the results are averaged. (): all."""
    l0_share: affects.Evaluation[UnitHalfOpen] = 1e-3
    """Threshold of the pseudo-ℓ0 norm. An attention weight counts if it exceeds this share of its row's sum of |A|."""
    shown_queries: affects.Evaluation[Positive[int]] = 8
    """Number of rows in the drawn attention map: one row for each of the last tokens of a prompt."""

    def __post_init__(self):
        if not 1 <= self.queries <= self.needles:
            raise UserError(f"eval.attention.queries={self.queries} must lie in 1 … needles={self.needles}")


class OutliersConfig(Group):
    """Settings of suite `outliers`: largest magnitudes of attention logits and hidden states (Table 5 of the paper)."""

    tokens: affects.Evaluation[Positive[int]] = 400_000
    """Largest number of tokens of each validation set."""
    ranks: affects.Evaluation[NonEmptyUnique[tuple[Positive[int], ...]]] = (1, 2, 3, 10, 100)
    """Ranks of the magnitudes to report. Rank 1 is the largest."""


class QuantizeConfig(Group):
    """Settings of suite `quantize`, which runs other suites with quantised attention (Figure 8 of the paper)."""

    bits: affects.Evaluation[NonEmptyUnique[tuple[Bits, ...]]] = (16, 8, 6, 4)
    """Numbers of bits from 2 to 16, or 4, 8 and 16 for "operands". With 16, as in Figure 8, nothing is quantised."""
    rounded: affects.Evaluation[Literal["logits", "operands", "products"]] = "logits"
    """What is rounded. "logits": attention logits, as in Figure 8. "operands": queries, keys and values, with a scale
    per token and (sub-)head. "products": the products with weights, in each way that `products` lists."""
    granularity: affects.Evaluation[Granularity] = "query"
    """Value of `model.attention_logit_granularity` in this suite."""
    products: affects.Evaluation[NonEmptyUnique[tuple[RoundedProducts, ...]]] = (
        *("int8_weights", "int4_weights"),
        *("int8", "int8_static", "fp8", "fp8_static"),
    )
    """Values of `model.matmul`. The ending "_static" means that each product has one fixed scale for its input."""
    calibration_tokens: affects.Evaluation[Positive[int]] = 16_384
    """Largest number of training tokens of each source from which static scales, errors and outliers are measured."""
    suites: affects.Evaluation[NonEmptyUnique[tuple[str, ...]]] = ("loss",)
    """Suites to run with quantised attention."""

    def __post_init__(self):
        if self.rounded == "operands" and (wrong := [bits for bits in self.bits if bits not in (4, 8, 16)]):
            raise UserError(f"eval.quantize.bits={wrong[0]}: queries, keys and values can be rounded to 4 or 8 bits")


class CacheSuiteConfig(Group):
    """Settings of suite `cache`, which runs other suites with a compressed key/value cache."""

    bits: affects.Evaluation[Unique[tuple[FewBits, ...]]] = (8, 4)
    """Numbers of bits, 8 or 4, of cached keys and values. (): none."""
    shares: affects.Evaluation[Unique[tuple[UnitClosed, ...]]] = (0.5, 0.25)
    """Shares of a row's tokens that each head keeps. (): none."""
    recent_share: affects.Evaluation[UnitHalfOpen] = 0.5
    """Share of the kept tokens that are the most recent ones."""
    chunk_tokens: affects.Evaluation[ChunkTokens] = 32
    """`model.cache.chunk_tokens` of the compressed caches. Rows of 32 tokens or fewer need smaller chunks."""
    suites: affects.Evaluation[NonEmptyUnique[tuple[str, ...]]] = ("loss",)
    """Suites to run with each cache."""


class TestConfig(Group):
    """Settings of suite `test`, which runs other suites on a test text."""

    path: flag.Bucket[flag.Location[affects.Evaluation[str | None]]] = None
    """Path of a store with the test text and no validation split (`difftx prepare --valid_fraction=0`)."""
    suites: affects.Evaluation[NonEmptyUnique[tuple[TestSuite, ...]]] = ("loss",)
    """Suites to run on the test text: "loss", "recall" or "position"."""


class GradientsConfig(Group):
    """Settings of suite `gradients`: gradient norms of each matrix and layer (Appendix F of the paper)."""

    tokens: affects.Evaluation[Positive[int]] = 65_536
    """Largest number of tokens of each validation set for one gradient."""
    at_initialization: affects.Evaluation[Unique[tuple[Initialization, ...]]] = get_args(Initialization)
    """Untrained models to measure too. "as_configured": the run's model. "no_scale": without the factor 1 - λ_init.
    "no_norm": without the head norm. "no_scale_no_norm": without both. "counterpart": for `diff`, a Transformer of
    equal size, and vice versa. All have `model.zero_init_output` = False and the same seed."""


class HarnessConfig(Group):
    """Settings of suite `harness`: tasks of EleutherAI's lm-eval (Tables 1 and 8). Requires the extra "eval"."""

    tasks: affects.Evaluation[NonEmptyUnique[tuple[str, ...]]] = HARNESS_TASKS
    """Tasks and groups of lm-eval, as `lm-eval ls tasks` lists them. The defaults are those of the paper."""
    num_fewshot: affects.Evaluation[NotNegative[int] | None] = None
    """Number of examples in a prompt. None: the task's own number, which is 0 for the default tasks."""
    limit: affects.Evaluation[Positive[int] | None] = None
    """Number of questions per task, starting with the first. None: all."""
    data_path: flag.Location[affects.Evaluation[str | None]] = None
    """Folder with JSON lines for the default tasks: arc_challenge_test.jsonl, arc_easy_test, boolq_val, hellaswag_val,
    openbookqa_test, piqa_val, winogrande_val, and <task>_train for few-shot examples. Files may be plain, .gz, .zst or
    .xz. `difftx/evals/harness/data.py` lists their fields. None: the Hugging Face hub."""
    include_path: flag.Location[affects.Evaluation[str | None]] = None
    """Folder of lm-eval YAML files that define further tasks."""
    ruler_lengths: affects.Evaluation[NonEmptyUnique[tuple[Positive[int], ...]]] = (4096,)
    """Prompt lengths of RULER's tasks ("ruler", "niah_single_1", …) in tokens, including the tokens to generate.
    Requires the extra "ruler"."""
    ruler_path: flag.Location[affects.Evaluation[str | None]] = None
    """Folder with the texts of RULER's tasks (docs/suites.md). None: lm-eval downloads them."""
    truncate: affects.Evaluation[bool] = False
    """What happens to requests that are longer than the context. True: they are truncated on the left, as by lm-eval's
    own models, and counted. False: they are errors."""
    seed: affects.Evaluation[Seed] = 1234
    """Random seed of the examples in prompts and of samples, below 2**32."""


class MathTaskConfig(Group):
    """An entry of `eval.math.tasks`: problems in files of JSON lines, in the format of a published data set."""

    name: affects.Evaluation[str]
    """Name of the task in the results."""
    format: affects.Evaluation[MathFormat]
    """Format of the test file (`difftx/evals/math.py`)."""
    test: flag.Bucket[flag.Location[affects.Evaluation[str]]]
    """Path of the file with the problems."""
    train: flag.Bucket[flag.Location[affects.Evaluation[str | None]]]
    """Path of the file with the demonstrations, or null."""
    train_format: affects.Evaluation[MathFormat | None]
    """Format of the file with the demonstrations. null: the value of `format`."""


class MathConfig(Group):
    """Settings of suite `math`: word problems (Appendix C of the paper's ICLR version). Requires the extra "eval"."""

    tasks: affects.Evaluation[tuple[MathTaskConfig, ...]] = ()
    """Mathematical tasks: ({"name": "gsm8k", "format": "gsm8k", "test": "gsm8k_test.jsonl", "train":
    "gsm8k_train.jsonl", "train_format": None}, …)."""
    shots: affects.Evaluation[NotNegative[int]] = 4
    """Number of demonstrations in a prompt, the same for all questions."""
    chain_of_thought: affects.Evaluation[bool] = True
    """Whether demonstrations include their solutions. With `shots` = 0: whether the prompt asks for steps."""
    questions: affects.Evaluation[Positive[int] | None] = None
    """Number of questions per task, drawn at random. None: all."""
    new_tokens: affects.Evaluation[Positive[int]] = 16_384
    """Largest number of tokens in an answer. The context length is a further limit."""
    temperature: affects.Evaluation[NotNegative[float]] = 0.0
    """Sampling temperature. With 0, the most likely token is taken."""
    seed: affects.Evaluation[Seed] = 0
    """Random seed of demonstrations, questions and samples, below 2**32."""

    def __post_init__(self):
        require_distinct_names("eval.math.tasks", [task.name for task in self.tasks])
        for task in self.tasks:
            if self.shots and task.train is None:
                raise UserError(
                    f"eval.math.tasks, task {task.name!r}: eval.math.shots={self.shots} demonstrations need a file, "
                    "train; name it, or use eval.math.shots=0"
                )


class EvalConfig(fields.Extensible, effect=affects.Effect.EVALUATION):
    """When and how to evaluate during training, and the settings of all suites."""

    every_steps: affects.Nothing[Positive[int]] = 1000
    """Number of steps between evaluations in the training loop. The last step is always evaluated."""
    suites: affects.Evaluation[tuple[str, ...]] = ("loss",)
    """Suites that the training loop runs. `difftx eval --list` lists all suites."""
    loss_tokens: affects.Evaluation[Positive[int]] = 1_048_576
    """Suites loss, recall and test: largest number of tokens of each validation set, or of the test text."""
    recall_max_bigram_count: affects.Evaluation[NotNegative[int]] = 1250
    """Suite recall: an AR-Hit (Zoology) counts only if the training data contain its bigram at most this often."""
    bigrams_path: flag.Header[flag.Location[affects.Evaluation[str | None]]] = None
    """Suite recall: file written by `difftx data bigrams`. None: count the bigrams at the start of the run. This is
    possible only if the run tokenises its own text."""
    position_documents: affects.Evaluation[Positive[int]] = 256
    """Suite position: largest number of long documents of each validation set."""
    throughput_rounds: affects.Evaluation[Positive[int]] = 5
    """Suite throughput: number of measurements per model. The result is their median."""
    throughput_steps: affects.Evaluation[Positive[int]] = 10
    """Suite throughput: number of batches per measurement."""
    sample_tokens: affects.Evaluation[Positive[int]] = 200
    """Suite sample: number of new tokens per prompt."""
    sample_temperature: affects.Evaluation[NotNegative[float]] = 0.8
    """Suite sample: sampling temperature. With 0, the most likely token is taken."""
    needle: NeedleConfig
    icl: IclConfig
    attention: AttentionConfig
    outliers: OutliersConfig
    quantize: QuantizeConfig
    cache: CacheSuiteConfig
    test: TestConfig
    gradients: GradientsConfig
    hallucination: HallucinationConfig
    judge: JudgeConfig
    harness: HarnessConfig
    math: MathConfig
