"""Extraction of a text's final answer, and comparison with the right answer by the library math-verify."""

import re

from difftx.errors import import_extra
from difftx.evals.math.formats import Problem, last_boxed

ANSWER = re.compile(r"(?:answer is:?|####)\s*", re.IGNORECASE)  # "####" precedes the answers of GSM8K.
# Time limit of math-verify to parse an expression, and to compare two; an answer that takes longer counts as wrong.
# math-verify uses SIGALRM, which works only in the main thread.
SECONDS = 5


def final_answer(text: str) -> str | None:
    r"""Return the last \boxed{…}, else the rest of the line after the last "answer is" or "####", else None."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    *before, last = ANSWER.split(text)
    return last.partition("\n")[0].strip().rstrip(".") if before else None


def is_right(text: str, problem: Problem) -> bool:
    """Return whether a text's final answer and the problem's answer are the same text or the same mathematical object.

    In a text without a final answer, the number or expression that math-verify finds counts. Problems with choices
    accept only the same text.

    Raises:
        UserError: math-verify is not installed.
    """
    math_verify = import_extra("math_verify", "eval")
    final = final_answer(text)
    if final is not None and _plain(final) == _plain(problem.answer):
        return True
    if problem.choices:
        return False
    if final is None:
        final = text
    elif problem.latex and "$" not in final:
        final = f"${final}$"
    right = math_verify.parse(f"${problem.answer}$", parsing_timeout=SECONDS)
    given = math_verify.parse(final, parsing_timeout=SECONDS)
    return math_verify.verify(right, given, timeout_seconds=SECONDS)


def _plain(answer: str) -> str:
    r"""Return an answer in lower case, without dollar signs, \text{…} and similar, extra space or a final period."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", answer)
    return " ".join(bare.replace("$", "").casefold().split()).rstrip(".")
