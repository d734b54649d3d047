"""Suite `math`: published formats, prompts, equivalent forms of an answer, and lengths.

Tests that need math-verify are marked `long`, because `make test-long` installs it. They are skipped if the extra is
not installed.
"""

import json
import types

import numpy as np
import pytest
from conftest import suite_config, write_text
from helpers.evals_answers import Writer
from helpers.evals_examples import write_lines

from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.math import NUDGE, STOP, Problem, final_answer, is_right, items_of, last_boxed, read_problems
from difftx.training.run import Run

# Format → a line with the fields of the published set, and its question, solution and answer.
PUBLISHED = {
    "gsm8k": (
        {"question": "Two and 3?", "answer": "It is 2 + 3 = <<2+3=5>>5.\n#### 1,005"},
        ("Two and 3?", "It is 2 + 3 = 5.", "1,005"),
    ),
    "math": (
        {"problem": "Half of $x$?", "solution": "So \\boxed{\\frac{x}{2}}.", "answer": "\\frac{x}{2}", "level": 1},
        ("Half of $x$?", "So \\boxed{\\frac{x}{2}}.", "\\frac{x}{2}"),
    ),
    "svamp": (
        {"ID": "chal-1", "Body": "Ann has 8 pens.", "Question": "How many are left of 3?", "Equation": "( 8.0 - 3.0 )",
         "Answer": 5.0, "Type": "Subtraction"},
        ("Ann has 8 pens. How many are left of 3?", "( 8.0 - 3.0 )", "5"),
    ),
    "asdiv": (
        {"body": "Seven red apples and two green apples.", "question": "How many?", "formula": "7+2=9",
         "answer": "9 (apples)", "solution_type": "Addition"},
        ("Seven red apples and two green apples. How many?", "7+2=9", "9"),
    ),
    "mawps": ({"input": "Joan has 7 shells. How many?", "target": 2.5}, ("Joan has 7 shells. How many?", None, "2.5")),
    "carp": (
        {"content": "Factor $x^2-1$.", "steps": "By squares.", "answer": "(x+1)(x-1)"},
        ("Factor $x^2-1$.", "By squares.", "(x+1)(x-1)"),
    ),
    "tabmwp": (
        {"question": "Is there a shortage?", "choices": ["shortage", "surplus"], "table": "Price | Sold\n$795 | 14",
         "table_title": None, "solution": "14 is less.", "answer": "surplus", "unit": None, "ans_type": "multi_text"},
        ("Price | Sold\n$795 | 14\nIs there a shortage?\nOptions: shortage, surplus", "14 is less.", "surplus"),
    ),
    "college_math": (
        {"question": "Solve $2x=1$.", "answer": "x=\\frac{1}{2}", "data_source": "college_math.A"},
        ("Solve $2x=1$.", None, "x=\\frac{1}{2}"),
    ),
}  # fmt: skip


@pytest.fixture
def math_verify():
    return pytest.importorskip("math_verify", reason="the extra `eval` is not installed")


def sums(count, first=0):
    return [
        {"question": f"What is {i} and {3 * i}?", "answer": f"{i} + {3 * i} = {4 * i}\n#### {4 * i}"}
        for i in range(first, first + count)
    ]


def task_of(test, **changes):
    return {"name": "sums", "format": "gsm8k", "test": str(test), "train": None, "train_format": None} | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("math")
    write_text(folder / "text.txt")
    write_lines(folder / "test.jsonl.gz", sums(11))
    write_lines(folder / "train.jsonl", sums(30, 100))
    return folder


def config_of(folder, *tasks, window=512, **changes):
    tasks = json.dumps(tasks or [task_of(f"{folder}/test.jsonl.gz", train=f"{folder}/train.jsonl")])
    changes = {f"eval.math.{name}": value for name, value in changes.items()}
    return suite_config(folder, window, **{"model.num_layers": 1, "eval.math.tasks": tasks} | changes)


def loaded(config):
    run = types.SimpleNamespace(config=config, tokenizer=load_tokenizer("bytes"))
    return [item for task in config.eval.math.tasks for item in items_of(run, task)]


def prompts_of(config):
    return [bytes(item.prompt).decode() for item in loaded(config)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_are_read(tmp_path, name):
    record, (question, solution, answer) = PUBLISHED[name]
    (problem,) = read_problems(write_lines(tmp_path / "a.jsonl", [record]), name, field="f")
    assert (problem.question, problem.solution, problem.answer) == (question, solution, answer)
    assert problem.choices == (("shortage", "surplus") if name == "tabmwp" else ())


def test_variants_of_published_fields(tmp_path):
    table = PUBLISHED["tabmwp"][0] | {"choices": None, "table_title": "Sales", "answer": "3/4"}
    (problem,) = read_problems(write_lines(tmp_path / "a.jsonl", [table]), "tabmwp", field="f")
    assert problem.question.splitlines()[0] == "Sales"
    assert (problem.choices, problem.answer, "Options" in problem.question) == ((), "3/4", False)
    # The original MATH has its answers only in the solutions.
    record = {"problem": "A", "solution": "First \\boxed{1}, then \\boxed{\\sqrt{2^{3}}}."}
    (problem,) = read_problems(write_lines(tmp_path / "b.jsonl", [record]), "math", field="f")
    assert problem.answer == "\\sqrt{2^{3}}"
    assert last_boxed("none") is None
    assert last_boxed("open \\boxed{1 + {2}") is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gsm8k", {"answer": "It is 5."}, "line 2: 'answer' has no answer in the form of gsm8k"),
        ("asdiv", {"answer": " (apples)"}, "line 2: 'answer' has no answer in the form of asdiv"),
        ("tabmwp", {"table": ""}, "line 2: table='' must be text"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, name, change, message):
    record = PUBLISHED[name][0]
    path = write_lines(tmp_path / "a.jsonl", [record, record | change])
    with pytest.raises(UserError, match=message):
        read_problems(path, name, field="eval.math.tasks, a.test")
    missing = {field: value for field, value in record.items() if field not in change}
    with pytest.raises(UserError, match="line 1 has no field"):
        read_problems(write_lines(tmp_path / "b.jsonl", [missing]), name, field="f")


def test_a_prompt_is_demonstrations_and_a_question(folder):
    prompts = prompts_of(config_of(folder, shots=2))
    context = prompts[0].removesuffix("Question: What is 0 and 0?\nAnswer:")
    assert prompts == [f"{context}Question: What is {i} and {3 * i}?\nAnswer:" for i in range(11)]
    shown = [f"Question: {r['question']}\nAnswer: {r['answer'].split(chr(10))[0]}" for r in sums(30, 100)]
    assert context.count("Question:") == 2
    for demonstration in context.removesuffix("\n\n").split("\n\n"):
        text, _, answer = demonstration.partition(" The answer is ")
        assert text in shown
        assert text.endswith(f"= {answer.removesuffix('.')}")
    assert prompts_of(config_of(folder, shots=2, seed=1))[0] != prompts[0]
    answers_alone = prompts_of(config_of(folder, shots=2, chain_of_thought="false"))[0]
    assert "?\nAnswer: The answer is " in answers_alone
    assert " + " not in answers_alone
    assert prompts_of(config_of(folder, shots=0))[3] == f"Question: What is 3 and 9?\nAnswer:{NUDGE}"
    assert prompts_of(config_of(folder, shots=0, chain_of_thought="false"))[3] == "Question: What is 3 and 9?\nAnswer:"
    assert STOP[0] in context
    assert len(set(prompts_of(config_of(folder, shots=2, questions=5))) & set(prompts)) == 5


def test_demonstrations_of_another_format(folder, tmp_path):
    test = write_lines(tmp_path / "mawps.jsonl", [PUBLISHED["mawps"][0]])
    train = write_lines(tmp_path / "math.jsonl", [PUBLISHED["math"][0]])
    task = task_of(test, format="mawps", train=train, train_format="math")
    (prompt,) = prompts_of(config_of(folder, task, shots=1))
    assert prompt.startswith(
        "Question: Half of $x$?\nAnswer: So \\boxed{\\frac{x}{2}}. The answer is $\\frac{x}{2}$.\n\n"
    )
    with pytest.raises(UserError, match="format 'mawps' has no solutions to show"):
        prompts_of(config_of(folder, task | {"train": test, "train_format": None}, shots=1))


def test_demonstrations_that_do_not_exist_or_fit_are_refused(folder):
    for changes, message in [
        ({"shots": 31}, "sums.train=.*train.jsonl has 30 problems, but eval.math.shots=31"),
        ({"window": 192}, r"line 1: the prompt has \d+ tokens, and .*=192; remove the line, or use fewer"),
        ({"window": 60, "shots": 0}, "line 1: the prompt has 60 tokens"),
        ({"window": 32, "shots": 0}, r"line 1: the prompt has 60 tokens, .*=32; remove the line$"),
    ]:
        with pytest.raises(UserError, match=message):
            loaded(config_of(folder, **changes))


def problem(answer, *, latex=False, choices=()):
    return Problem(name="a", question="b", solution=None, answer=answer, latex=latex, choices=choices)


LATEX = ["\\frac12", "(x+1)(x-1)", "\\text{Evelyn}", "\\left( 3, \\frac{\\pi}{2} \\right)"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1/2", ["The answer is 0.5.", "The answer is $\\frac12$.", "\\boxed{\\frac{2}{4}}", "Just 1/2"], ["2", ".51"]),
        ("1,005", ["The answer is 1005.", "The answer is $1,005.", "= 1005 dollars"], ["The answer is 1.005", ""]),
        ("18", ["3 * 6 = 18. The answer is 18.", "The answer is 18.0", "#### 18", "The answer is 3. The answer is 18"],
         ["The answer is 8.", "18 no, 19. The answer is 19.", "The answer is -18"]),
        (LATEX[0], ["The answer is 0.5.", "The answer is \\frac{1}{2}", "\\boxed{1/2}"], ["The answer is $2$."]),
        (LATEX[1], ["The answer is $x^2-1$.", "\\boxed{(x-1)(x+1)}", "The answer is x^2 - 1."], ["\\boxed{x^2+1}"]),
        (LATEX[2], ["The answer is Evelyn.", "\\boxed{\\text{Evelyn}}"], ["The answer is Eve.", "Evelyn"]),
        (LATEX[3], ["The answer is $(3, \\pi/2)$."], ["The answer is $(3, \\pi)$."]),
    ],
)  # fmt: skip
def test_equivalent_answers_are_right(math_verify, answer, right, wrong):
    asked = problem(answer, latex=answer in LATEX)
    assert [is_right(text, asked) for text in right] == [True] * len(right)
    assert [is_right(text, asked) for text in wrong] == [False] * len(wrong)


@pytest.mark.long
def test_answer_from_choices_must_be_the_same_text(math_verify):
    times = problem("9:30 A.M.", choices=("9:30 A.M.", "9:45 A.M."))
    assert is_right("So it starts then. The answer is 9:30 a.m.", times)
    assert not is_right("The answer is 9:45 A.M.", times)
    assert not is_right("9:30 A.M.", times)
    assert final_answer("The answer is: yes.\nQuestion") == "yes"
    assert final_answer("The answer is no. Wait, the Answer is yes.\nThe end") == "yes"
    assert final_answer("The answer is no, \\boxed{yes} and \\boxed{yes, {too}}") == "yes, {too}"
    assert final_answer("no") is None


@pytest.mark.long
def test_comparison_that_times_out_counts_as_wrong(math_verify, monkeypatch):
    monkeypatch.setattr("difftx.evals.math.SECONDS", 1)
    assert not is_right("The answer is 9^9^9^9", problem("5"))


def evaluated(config, workdir):
    return evals.evaluate(Run.open(config, workdir), None, 3, ["math"])["math"]


def replace_model(monkeypatch, answer):
    """Answer the question of each prompt by `answer(question)`."""
    return Writer(monkeypatch, lambda text: answer(text.rpartition("Question: ")[2].partition("\nAnswer:")[0]))


@pytest.mark.long
def test_lengths_and_accuracy_of_known_answers(math_verify, folder, tmp_path, monkeypatch):
    """Every third answer is wrong, and answer i takes 20 + 30 i characters, up to the limit."""

    def answer(question):
        i = int(question.split()[2])
        return f"{'x' * 30 * i} The answer is {4 * i + (i % 3 == 0):4}."

    config = config_of(folder, shots=1, new_tokens=250)
    model = replace_model(monkeypatch, answer)
    expected = evaluated(config, tmp_path)
    assert {stop for _, stop in model.options} == {STOP}
    lengths = np.minimum(20 + 30 * np.arange(11), 250)
    assert expected.numbers == {
        "sums_accuracy": pytest.approx(np.mean([i % 3 != 0 and 20 + 30 * i <= 250 for i in range(11)])),
        "sums_tokens": pytest.approx(np.mean(lengths)),
        "sums_truncated": pytest.approx(np.mean([20 + 30 * i >= 250 for i in range(11)])),
    } | {f"average_{what}": expected.numbers[f"sums_{what}"] for what in ("accuracy", "tokens", "truncated")}
    details = expected.details["tasks"]["sums"]
    assert details["tokens_by_percentile"]["50"] == np.median(lengths)
    assert expected.charts[0].series[0].y == [np.percentile(lengths, p) for p in expected.charts[0].series[0].x]
    assert details["least_tokens_allowed"] == 250
