"""What suites and their numbers mean: explanations for readers, units, and whether lower or higher is better."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from difftx.config.suites import SUITES, summary
from difftx.evals.result import Measure
from difftx.json_files import schema_error

# Units of numbers that describe how much was measured, such as the number of tokens.
COUNTS = ("tokens", "documents", "demonstrations")
# Suite → title, and a sentence that says what is measured and how to read it.
EXPLANATIONS = {
    "loss": ("Validation loss", "How well the model predicts the next token of text that it was not trained on."),
    "test": (
        "Test text",
        "Other suites on a text that neither the training nor the choice of settings has used.",
    ),
    "recall": (
        "Recall of earlier tokens",
        "AR-Hit tokens repeat a pair of tokens from earlier in the row, so that attention can look them up. "
        "Others are all remaining tokens.",
    ),
    "position": (
        "Loss by position",
        "Mean loss over the first tokens of long documents. A model that uses a long context falls further.",
    ),
    "exact_match": (
        "Synthetic task",
        "Share of right answers (accuracy), and of examples in which every answer is right (exact match).",
    ),
    "needle": (
        "Needles in a haystack",
        "Share of numbers that the model retrieves from sentences hidden in a long text.",
    ),
    "icl": (
        "Learning from demonstrations",
        "Accuracy of classification with demonstrations in the prompt. The margin is the best minus the worst accuracy "
        "over permutations of the same demonstrations, so a small margin means that the order matters little.",
    ),
    "attention": (
        "Attention weights",
        "Where the last token of a prompt looks: at the requested answer, or at irrelevant text (noise). "
        "Differential attention is meant to move weight from noise to the answer.",
    ),
    "hallucination": (
        "Hallucinations",
        "Share of summaries and answers that a judge finds accurate, given the document that they are about.",
    ),
    "harness": ("Tasks of lm-eval", "Share of multiple-choice questions in which the right choice is the most likely."),
    "math": ("Word problems", "Share of problems with the right final answer, and the length of the answers."),
    "sample": ("Samples", "Continuations of the same validation text. They show style and gross errors, not quality."),
    "throughput": (
        "Throughput",
        "Speed of the model and of its counterpart on the same rows. Rise and drop are those of the differential model "
        "relative to its Transformer.",
    ),
    "outliers": (
        "Activation outliers",
        "Largest and median magnitude of attention logits and hidden states. Large outliers make quantisation hard.",
    ),
    "quantize": (
        "Attention in few bits",
        "Other suites with attention rounded to few bits. A robust model changes little from 16 bits to 4.",
    ),
    "cache": (
        "Compressed key/value cache",
        "Other suites with keys and values in few bits, or with only a part of the tokens in the cache.",
    ),
    "gradients": (
        "Gradients",
        "Norms of the gradient by matrix, and how alike the gradients of the two attention groups are.",
    ),
}


# Part of a number's name → measure. The first match counts. Suites that run other suites add words before and after
# the name, as in `recall_ar_hit_loss_4_bits`, so patterns match whole words anywhere unless they say otherwise.
RULES = {
    "(answer|abstention|empty|unfinished)_rate|documents_cut|reference_in_document|truncated": Measure("share"),
    "stderr": Measure("share"),
    "perplexity": Measure("", "lower"),
    "bits_per_byte": Measure("bits per byte", "lower"),
    "bytes_per_token": Measure("bytes per token", "lower"),
    "tokens_per_second": Measure("tokens per second", "higher"),
    "percent": Measure("%", "lower"),
    "margin": Measure("share", "lower"),
    r"acc|acc_norm|accuracy|exact_match|average_paper|f1|rouge_l|n\d+_r\d+_\d+": Measure("share", "higher"),
    "loss": Measure("nats per token", "lower"),
    r"(logits|hidden)_top_\d+": Measure("", "lower"),
    "answer_(tokens|words)": Measure("per answer"),
    "tokens": Measure("tokens"),
    "documents": Measure("documents"),
    "shots|stable_shots": Measure("demonstrations"),
    "kl|entropy": Measure("nats"),
    "^answer$": Measure("share", "higher"),
    "^noise$": Measure("share", "lower"),
    "^(answer|others|noise|question|first)|^l0": Measure("share"),
}


# Words in names of numbers → how readers know them.
WORDS = {"ar hit": "AR-Hit"}
# Suite → number → what it is, for numbers whose names do not tell readers.
LABELS = {
    "attention": {
        "answer": "weight on the answer",
        "others": "weight on the other needles",
        "noise": "weight on irrelevant text (noise)",
        "question": "weight on the question",
        "first": "weight on the first token",
        "answer_signed": "weight on the answer, with its sign",
        "noise_signed": "weight on noise, with its sign",
        "first_signed": "weight on the first token, with its sign",
        "first_a1": "weight of A1 on the first token",
        "first_a2": "weight of A2 on the first token",
        "gini": "Gini coefficient of the weights (0: even)",
        "entropy": "entropy of the weights",
        "l0": "tokens with a weight above the threshold",
        "lambda": "λ",
        "cosine_answer": "cosine of A1 and A2 on the answer",
        "cosine_noise": "cosine of A1 and A2 on noise",
        "kl_answer": "KL(A1 ‖ A2) on the answer",
        "kl_noise": "KL(A1 ‖ A2) on noise",
        "cosine_answer_with_first": "cosine of A1 and A2 on the answer and the first token",
        "cosine_noise_with_first": "cosine of A1 and A2 on noise and the first token",
        "kl_answer_with_first": "KL(A1 ‖ A2) on the answer and the first token",
        "kl_noise_with_first": "KL(A1 ‖ A2) on noise and the first token",
    }
}


@functools.cache
def measure_of(number: str) -> Measure:
    """Return the measure of a number of a suite by its name. A number that no rule knows has no unit or direction."""
    for words, measure in RULES.items():
        if re.search(rf"(^|_)({words})(_|$)", number):
            return measure
    return Measure("")


def measures_of(result: Mapping[str, Any]) -> dict[str, Measure]:
    """Return the measure of each number in a result as JSON: the suite's own, or else that of the number's name."""
    stored = result.get("measures")
    own = {} if stored is None or schema_error(stored, {str: {"unit": str}}) else stored
    measures = {name: measure_of(name) for name in result["numbers"]}
    for name, measure in own.items():
        if (better := measure.get("better")) in ("lower", "higher", None):
            measures[name] = Measure(measure["unit"], better)
    return measures


def explanation_of(suite: str) -> tuple[str, str]:
    """Return a suite's title and explanation. A suite of an extension has its name and the line of `--list`."""
    return EXPLANATIONS.get(suite, (suite, summary(suite) if suite in SUITES else ""))


def format_value(value: Any) -> str:
    """Format a value for a table: integers in full, other numbers with four or five significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (abs(value) < 1e15 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:.4g}"
