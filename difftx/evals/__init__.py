"""Evaluation suites and their registry. Suites are imported on first use, because their imports take seconds."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from difftx.errors import require_extra
from difftx.registry import Registry

if TYPE_CHECKING:
    from difftx.evals.suite import Suite


class _Listed(NamedTuple):
    module: str  # Module of this package that defines the `SUITE`.
    summary: str  # Text for `difftx eval --list`.
    requires: tuple[str, ...] = ()  # Modules of the extra "eval" that the suite imports.


_LISTED = {
    "loss": _Listed("loss", "loss, perplexity and bits per byte of the validation sets"),
    "test": _Listed("held_out", "the suites of `eval.test.suites` on a text that training has not used"),
    "recall": _Listed("recall", "loss of tokens that repeat a pair of tokens of their row, and of all others"),
    "position": _Listed("position", "loss over the first 1, 2, 4, … tokens of long documents"),
    "exact_match": _Listed("exact_match", "share of right answers of a synthetic task"),
    "needle": _Listed("needle.suite", "retrieval of magic numbers from a long text, by generated answers"),
    "icl": _Listed("icl", "accuracy of labels, with more and more demonstrations in the prompt"),
    "attention": _Listed("attention.suite", "attention to the answer and to noise in the prompts of `needle`"),
    "hallucination": _Listed("hallucination.suite", "share of answers that a judge finds free of hallucinations"),
    "harness": _Listed("harness.suite", "tasks of lm-eval", ("lm_eval", "datasets")),
    "math": _Listed("math", "accuracy and length of answers to word problems", ("math_verify",)),
    "sample": _Listed("sample", "continuations of the first validation documents"),
    "throughput": _Listed("throughput", "speed of the model and of its counterpart, measured in turn"),
    "outliers": _Listed("outliers", "largest and median magnitudes of attention logits and hidden states"),
    "quantize": _Listed("quantize", "the suites of `eval.quantize.suites` with attention rounded to few bits"),
    "cache": _Listed("cache", "the suites of `eval.cache.suites` with a compressed key/value cache"),
    "gradients": _Listed("gradients", "gradients of the validation loss, at the checkpoint and at initialisation"),
}

# Each entry is a `Suite` (`difftx/evals/suite.py`).
SUITES: Registry["Suite"] = Registry(
    "suite",
    {name: f"{__name__}.{listed.module}:SUITE" for name, listed in _LISTED.items()},
    hint=" Tasks of lm-eval need --suite=harness --eval.harness.tasks=….",
)


def summary(name: str) -> str:
    """Return what a suite measures, in one line. For an extension's suite, this is the docstring's first line."""
    return _LISTED[name].summary if name in _LISTED else (SUITES[name].evaluate.__doc__ or "").partition("\n")[0]


def explanation_of(suite: str) -> tuple[str, str]:
    """Return a suite's title and explanation. By default, these are its name and its line in `difftx eval --list`."""
    if suite not in SUITES:  # The extension that defines it is not loaded.
        return suite, ""
    return SUITES[suite].title or suite, SUITES[suite].explanation or summary(suite)


def check_suites(names: Iterable[str]) -> None:
    """Raise `UserError` if a suite does not exist, or if a module that it requires is not installed."""
    names = list(names)
    SUITES.check(names)
    for module in (module for name in names if name in _LISTED for module in _LISTED[name].requires):
        require_extra(module, "eval")
