"""Extraction of a text's final answer, and comparison with the right answer by the library math-verify."""

import re

from difftx.errors import import_extra
from difftx.evals.math.formats import Problem, last_boxed

ANSWER = re.compile(r"(?:answer is:?|####)\s*", re.IGNORECASE)  # "####" precedes the answers of GSM8K.
# Time limit to parse an expression, and to compare two expressions; after it, an answer counts as wrong. math-verify
# uses SIGALRM, which works only in the main thread.
SECONDS = 5


def final_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{…}, else the rest of the line after the last "answer is" or "####".

    None if the text has neither.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    *before, last = ANSWER.split(text)
    return last.partition("\n")[0].strip().rstrip(".") if before else None


def is_right(text: str, problem: Problem) -> bool:
    """Return whether a text's final answer and the problem's answer are the same text or the same mathematical object.

    If a text has no final answer, the number or expression that math-verify finds in it counts. Problems with choices
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
    right, given = (
        math_verify.parse(expression, parsing_timeout=SECONDS) for expression in (f"${problem.answer}$", final)
    )
    return math_verify.verify(right, given, timeout_seconds=SECONDS)


def _plain(answer: str) -> str:
    r"""Return an answer in lower case, without dollar signs, \text and the like, extra space or final period."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", answer)
    return " ".join(bare.replace("$", "").casefold().split()).rstrip(".")
