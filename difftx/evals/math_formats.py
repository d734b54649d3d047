"""Sets of word problems as they were published: which fields make a question, its solution and its answer."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftx.config.eval import MathFormat
from difftx.data.records import Record, read_records
from difftx.errors import UserError

BOXED = r"\boxed{"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Fields of a set, and how they are put together."""

    question: tuple[str, ...]  # Fields that follow each other in the question.
    solution: str | None  # Field of the reasoning; None: there is none.
    answer: str
    join: str = " "  # Between the question's fields.
    optional: tuple[str, ...] = ()  # Fields of the question that may be missing, null or empty.
    solution_end: str | None = None  # Where the solution's field ends: what follows is the answer.
    solution_drop: str | None = None  # A pattern of what is left out of it.
    answer_pattern: str = r"(?s)(.*)"  # What of the field is the answer: the pattern's group.
    latex: bool = False  # The answer is LaTeX.


# Sources: the data sets' own repositories; ASDiv, SVAMP and MAWPS as the Hugging Face hub has them, MAWPS and CARP as
# most evaluations of mathematical models read them.
FORMATS: Mapping[MathFormat, Format] = {
    "gsm8k": Format(
        question=("question",),
        solution="answer",
        answer="answer",
        solution_end="####",
        solution_drop=r"<<.*?>>",  # What a calculator is to be told.
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
    """A question with what is right."""

    name: str  # Where it stands, for messages.
    question: str
    solution: str | None
    answer: str
    latex: bool  # The answer is LaTeX.
    choices: tuple[str, ...]  # The answer is one of these texts; (): it is free.


def read_problems(path: str, name: MathFormat, *, field: str) -> list[Problem]:
    """Return the problems of a file of JSON lines, plain or compressed.

    Args:
        path: of the file.
        name: of its format.
        field: what the user set, for messages.

    Raises:
        UserError: the file cannot be read or is empty, or a line has not the format's fields.
    """
    return [_problem(record, name, FORMATS[name]) for record in read_records(Path(path), field=field, what="problems")]


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{…} of a text, whose braces may hold others."""
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
    if name == "math" and solution is not None and form.answer not in record.values:  # The set itself has only this.
        answer = last_boxed(solution)
    else:
        found = re.match(form.answer_pattern, _scalar(record, form.answer))
        answer = None if found is None else found[1]
    if answer is None or not answer.strip():
        raise UserError(f"{record.name} has no answer as {name} has it, in {form.answer!r}")
    if solution is not None:
        solution = solution.partition(form.solution_end)[0] if form.solution_end else solution
        solution = re.sub(form.solution_drop, "", solution) if form.solution_drop else solution
    return Problem(
        name=record.name,
        question=form.join.join(parts),
        solution=None if solution is None else solution.strip(),
        answer=answer.strip(),
        latex=form.latex,
        choices=tuple(map(str, choices or ())),
    )


def _part(record: Record, field: str) -> str:
    """Return a field of a question; a list is of choices."""
    value = record.field(field)
    return f"Options: {', '.join(map(str, value))}" if isinstance(value, list) else record.text(field).strip()


def _scalar(record: Record, field: str) -> str:
    """Return a text, or a number as text: 145 for 145.0."""
    value: Any = record.field(field)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) in (int, float):
        return str(value)
    return record.text(field)
