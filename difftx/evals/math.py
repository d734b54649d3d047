"""Suite `math`: accuracy and length of answers to word problems (Appendix C of the paper at ICLR; docs/suites.md).

A prompt consists of demonstrations (solved problems) and a question. A demonstration ends with an empty line:

    Question: A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?
    Answer: It takes 2/2=1 bolt of white fiber. So the total amount of fabric is 2+1=3 bolts. The answer is 3.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from difftx.config.eval import MathConfig, MathFormat, MathTaskConfig
from difftx.data.records import Record, read_records
from difftx.errors import UserError, import_extra
from difftx.evals import check_suites
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Better, LineChart, Number, Result, Series
from difftx.evals.suite import Suite
from difftx.inference.generate import Request
from difftx.inference.sampling import Sampling, derived_seed
from difftx.storage.paths import path_of
from difftx.training.run import Run

STOP = ("\nQuestion:",)  # After its answer, the model may continue with a new problem.
NUDGE = " Let's think step by step."  # End of prompts without demonstrations (arXiv 2205.11916).
ANSWER = re.compile(r"(?:answer is:?|####)\s*", re.IGNORECASE)  # "####" precedes the answers in GSM8K.
# Time limit for math-verify to parse or compare expressions. An answer that takes longer counts as wrong. math-verify
# uses SIGALRM, so it only works in the main thread.
SECONDS = 5
# Metric of a task → unit and better direction.
METRICS: dict[str, tuple[str, Better]] = {
    "accuracy": ("share", "higher"),
    "tokens": ("tokens", None),
    "truncated": ("share", None),
}
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
SHOWN = 3  # Answers per task in the details, each truncated to `SHOWN_CHARACTERS`.
SHOWN_CHARACTERS = 4000
BOXED = r"\boxed{"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How to make a `Problem` from a record of a published data set."""

    question: tuple[str, ...]  # Fields that form the text of the question, in this order.
    solution: str | None  # Field with the reasoning, or None.
    answer: str  # Field with the answer.
    join: str = " "  # Separator between the fields of the question.
    optional: tuple[str, ...] = ()  # Fields of the question that may be missing, null or empty.
    removed_from_solution: str = "(?!)"  # Regular expression for text to remove. (?!) matches nothing.
    answer_pattern: str = r"(?s)(.*)"  # Regular expression. Its group is the answer within the field `answer`.
    latex: bool = False  # Whether answers are LaTeX.


# Field names are those in the data sets' own repositories, or on the Hugging Face Hub for ASDiv, SVAMP and MAWPS. Most
# evaluations of mathematical models use these names for MAWPS and CARP.
FORMATS: Mapping[MathFormat, Format] = {
    "gsm8k": Format(
        question=("question",),
        solution="answer",
        answer="answer",
        removed_from_solution=r"<<.*?>>|####[\s\S]*",  # Calculator annotations, and the final answer.
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
    solution: str | None  # The reasoning. None if the set has none.
    answer: str
    latex: bool  # Whether the answer is LaTeX.
    choices: tuple[str, ...]  # Texts to choose the answer from. Empty if any answer may be given.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathItem(Request):
    """The request for an answer to a problem."""

    problem: Problem


def items_of(run: Run, config: MathTaskConfig) -> list[MathItem]:
    """Return the requests of a task. The same files, settings and tokenizer always give the same requests.

    All prompts have the same demonstrations. Raise `UserError` if a file is invalid or a prompt is too long.
    """
    settings, context_length = run.config.eval.math, run.config.data.sequence_length
    rng = np.random.default_rng(settings.seed)
    field = f"eval.math.tasks, {config.name}"
    context = _demonstrations(settings, config, field, rng)
    problems = read_problems(config.test, config.format, field=f"{field}.test")
    if settings.questions is not None:
        problems = [problems[i] for i in sorted(rng.permutation(len(problems))[: settings.questions])]
    nudge = NUDGE if settings.chain_of_thought and not settings.shots else ""
    items = []
    for number, problem in enumerate(problems):
        prompt = run.tokenizer.encode_prompt(f"{context}Question: {problem.question}\nAnswer:{nudge}")
        if len(prompt) >= context_length:
            raise UserError(
                f"{problem.name}: the prompt has {len(prompt)} tokens, and the model's context "
                f"data.sequence_length={context_length}; remove the line"
                + (f", or use fewer demonstrations than eval.math.shots={settings.shots}" if settings.shots else "")
            )
        new_tokens, seed = min(settings.new_tokens, context_length - len(prompt)), derived_seed(settings.seed, number)
        items.append(MathItem(problem=problem, prompt=prompt, new_tokens=new_tokens, seed=seed))
    return items


def _demonstrations(settings: MathConfig, config: MathTaskConfig, field: str, rng: np.random.Generator) -> str:
    form = config.train_format or config.format
    if not settings.shots or config.train is None:
        return ""
    problems = read_problems(config.train, form, field=f"{field}.train")
    if len(problems) < settings.shots:
        raise UserError(
            f"{field}.train={config.train} has {len(problems)} problems, but eval.math.shots={settings.shots}"
        )
    chosen = [problems[i] for i in rng.permutation(len(problems))[: settings.shots]]
    if settings.chain_of_thought and any(problem.solution is None for problem in chosen):
        raise UserError(
            f"{field}: format {form!r} has no solutions to show; set train and train_format to a file of a format "
            "with solutions, or use eval.math.chain_of_thought=false"
        )
    text = ""
    for problem in chosen:
        reasoning = f"{problem.solution} " if settings.chain_of_thought else ""
        answer = f"${problem.answer}$" if problem.latex else problem.answer
        text += f"Question: {problem.question}\nAnswer: {reasoning}The answer is {answer}.\n\n"
    return text


def read_problems(path: str, name: MathFormat, *, field: str) -> list[Problem]:
    """Return the problems in a file of format `name`. Errors mention the config field `field`, which has the path."""
    records = read_records(path_of(field, path), field=field, what="problems")
    return [_problem(record, name, FORMATS[name]) for record in records]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} in a text, with nested braces. None if it is missing or unclosed."""
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
    # In the original MATH set, there is no answer field: the solution contains the answer in \boxed{…}.
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


def evaluate(evaluation: Evaluation) -> Result:
    """Generate an answer to each problem. Return each task's numbers, and their means over tasks."""
    by_task, details, lines = {}, {}, []
    temperature = evaluation.run.config.eval.math.temperature
    sampling = Sampling(repetition_penalty=None, temperature=temperature, top_k=None, top_p=None)
    for task, items in open_tasks(evaluation.run).items():
        done = evaluation.completions(items, lambda item: item, sampling, stop=STOP, what=f"problems of {task}")
        answers = [(item, answer | {"right": is_right(answer["text"], item.problem)}) for item, answer in done]
        right = np.array([answer["right"] for _, answer in answers], np.float64)
        lengths = np.array([answer["tokens"] for _, answer in answers], np.float64)
        percentiles = np.percentile(lengths, PERCENTILES).tolist()
        by_task[task] = {
            "accuracy": float(np.mean(right)),
            "tokens": float(np.mean(lengths)),  # Mean length of an answer.
            "truncated": float(np.mean([answer["ended_by"] == "limit" for _, answer in answers])),
        }
        details[task] = {
            "problems": len(answers),
            "accuracy_stderr": float(np.std(right, ddof=1)) / math.sqrt(len(right)) if len(right) > 1 else None,
            "tokens_by_percentile": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
            "least_tokens_allowed": min(item.new_tokens for item in items),
            "first": [
                {"problem": item.problem.name, **answer, "right_answer": item.problem.answer}
                | {"text": answer["text"][:SHOWN_CHARACTERS]}
                for item, answer in answers[:SHOWN]
            ],
        }
        lines.append(Series(name=task, x=[float(value) for value in PERCENTILES], y=percentiles))
    averages = {metric: float(np.mean([of_task[metric] for of_task in by_task.values()])) for metric in METRICS}
    numbers = {
        f"{name}_{metric}": Number(of_task[metric], *said)
        for name, of_task in ({"average": averages} | by_task).items()
        for metric, said in METRICS.items()
    }
    chart = LineChart(
        name="math_tokens", title="Length of answers", x_label="percentile of answers", y_label="tokens", series=lines
    )
    return Result(numbers=numbers, details={"tasks": details}, charts=[chart])


def open_tasks(run: Run) -> dict[str, list[MathItem]]:
    """Return the items of each task. Raise `UserError` if there are none, one is invalid, or math-verify is missing."""
    check_suites(["math"])
    if not run.config.eval.math.tasks:
        raise UserError("suite 'math': eval.math.tasks is empty; set it to files of problems (docs/config.md)")
    return {config.name: items_of(run, config) for config in run.config.eval.math.tasks}


def is_right(text: str, problem: Problem) -> bool:
    """Return whether a text's final answer equals the problem's answer, as text or as a mathematical object.

    If the text has no final answer, math-verify looks for a number or expression in the whole text. For problems with
    choices, the texts must be the same.
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


def final_answer(text: str) -> str | None:
    r"""Return the last \boxed{…}, else the rest of the line after the last "answer is" or "####", else None."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    *before, last = ANSWER.split(text)
    return last.partition("\n")[0].strip().rstrip(".") if before else None


def _plain(answer: str) -> str:
    r"""Return an answer in lower case, without dollar signs, \text{…} and similar, extra spaces or a final period."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", answer)
    return " ".join(bare.replace("$", "").casefold().split()).rstrip(".")


SUITE = Suite(
    evaluate=evaluate,
    check=open_tasks,
    revision=1,
    title="Word problems",
    explanation="Share of problems with the right final answer, and the length of the answers.",
)
