"""Formats of published sets of word problems: the fields of questions, solutions and answers."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from difftx.config.eval import MathFormat
from difftx.data.records import Record, read_records
from difftx.errors import UserError
from difftx.storage.paths import path_of

BOXED = r"\boxed{"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How to make a `Problem` of a record of a published data set."""

    question: tuple[str, ...]  # Fields whose texts form the question, in this order.
    solution: str | None  # Field of the reasoning; None: the set has none.
    answer: str  # Field of the answer.
    join: str = " "  # Separator between the fields of the question.
    optional: tuple[str, ...] = ()  # Fields of the question that may be missing, null or empty.
    removed_from_solution: str = "(?!)"  # Regular expression of text to remove; (?!) matches nothing.
    answer_pattern: str = r"(?s)(.*)"  # Regular expression whose group is the answer within the field `answer`.
    latex: bool = False  # Whether answers are LaTeX.


# The names of fields follow the data sets' own repositories, or the Hugging Face hub for ASDiv, SVAMP and MAWPS. Most
# evaluations of mathematical models read MAWPS and CARP with these names.
FORMATS: Mapping[MathFormat, Format] = {
    "gsm8k": Format(
        question=("question",),
        solution="answer",
        answer="answer",
        removed_from_solution=r"<<.*?>>|####[\s\S]*",  # Annotations for a calculator, and the final answer.
        answer_pattern=r"(?s).*####\s*(.+)",
    ),
    "math": Format(question=("problem",), solution="solution", answer="answer", latex=True),
    "svamp": Format(question=("Body", "Question"), solution="Equation", answer="Answer"),
    "asdiv": Format(question=("body", "question"), solution="formula", answer="answer", answer_pattern=r"([^(]+)"),
    "mawps": Format(question=("input",), solution=None, answer="target"),
    "carp": Format(question=("content",), solution="steps", answer="answer", latex=True),
    "tabmwp": Format(
        question=("table_title", "table", "question", "choices"),
        solution="solution",
        answer="answer",
        join="\n",
        optional=("table_title", "choices"),
    ),
    "college_math": Format(question=("question",), solution=None, answer="answer", latex=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with its solution and its right answer."""

    name: str  # File and line number, for error messages.
    question: str
    solution: str | None  # The reasoning; None: the set has none.
    answer: str
    latex: bool  # Whether the answer is LaTeX.
    choices: tuple[str, ...]  # Texts, one of which is the answer; empty if any answer may be given.


def read_problems(path: str, name: MathFormat, *, field: str) -> list[Problem]:
    """Return the problems of a file in the format `name`. Errors name the config field `field`, which has the path."""
    records = read_records(path_of(field, path), field=field, what="problems")
    return [_problem(record, name, FORMATS[name]) for record in records]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} in a text, with nested braces, or None if it is missing or unclosed."""
    start = text.rfind(BOXED)
    depth = 0
    for end in range(start + len(BOXED) - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + len(BOXED) : end]
    return None


def _problem(record: Record, name: MathFormat, form: Format) -> Problem:
    parts = [_part(record, field) for field in form.question if field not in form.optional or record.values.get(field)]
    choices = record.values.get("choices") if "choices" in form.question else None
    solution = None if form.solution is None else _scalar(record, form.solution)
    # The original set MATH has no answer field: the solution contains the answer in \boxed{…}.
    if name == "math" and solution is not None and form.answer not in record.values:
        answer = last_boxed(solution)
    else:
        found = re.match(form.answer_pattern, _scalar(record, form.answer))
        answer = None if found is None else found[1]
    if answer is None or not answer.strip():
        raise UserError(f"{record.name}: {form.answer!r} has no answer in the form of {name}")
    return Problem(
        name=record.name,
        question=form.join.join(parts),
        solution=None if solution is None else re.sub(form.removed_from_solution, "", solution).strip(),
        answer=answer.strip(),
        latex=form.latex,
        choices=tuple(map(str, choices or ())),
    )


def _part(record: Record, field: str) -> str:
    value = record.field(field)
    return f"Options: {', '.join(map(str, value))}" if isinstance(value, list) else record.text(field).strip()


def _scalar(record: Record, field: str) -> str:
    """Return a field's text, or its number as text: "145" for 145 and 145.0."""
    value: Any = record.field(field)
    if type(value) is float and value.is_integer():
        value = int(value)
    return str(value) if type(value) in (int, float) else record.text(field)
