"""Whether what a model wrote ends with the right answer, by the library math-verify."""

import re

from difftx.data.readers import import_extra
from difftx.evals.math_formats import Problem, last_boxed

ANSWER = re.compile(r"(?:answer is:?|####)\s*", re.IGNORECASE)  # The second as GSM8K has it.
SECONDS = 5  # To read an expression, and to compare two: then it is wrong. By SIGALRM, so in the main thread alone.


def final_answer(text: str) -> str | None:
    r"""Return what is in the last \boxed{…}, else in a line after "answer is" or "####"; None: nowhere."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    *before, last = ANSWER.split(text)
    return last.partition("\n")[0].strip().rstrip(".") if before else None


def is_right(text: str, problem: Problem) -> bool:
    """Return whether a text's final answer is the problem's, as the same text or the same mathematical object.

    Without a final answer, of numbers and expressions, the one counts that math-verify finds.

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
    """Return an answer without what only its dress is: signs of mathematics, case, space."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", answer)
    return " ".join(bare.replace("$", "").casefold().split()).rstrip(".")
