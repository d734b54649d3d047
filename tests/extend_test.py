"""The files and commands of docs/extend.md, in a folder outside the repository."""

import csv
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, child_environment, write_text
from helpers.cases import marked
from helpers.pages import DOCS, named_files, page_commands, run_command

from difftx import registry
from difftx.errors import UserError
from difftx.files import source_sha256

# The files that the page shows, and those in docs/extensions, to which it refers.
FILES = named_files("extend.md") | {path.name: path.read_text() for path in sorted((DOCS / "extensions").glob("*.py"))}
COMMANDS = page_commands("extend.md")
SHORT = TINY | {"eval.loss_tokens": "256", "eval.sample_tokens": "4", "logging.trackers": ""}


@pytest.fixture
def page_folder(tmp_path):
    """A folder with the files of the page."""
    write_text(tmp_path / "text.txt")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(page_folder, line, *more, code=0):
    """Execute a command of the page with tiny sizes, and return its output."""
    fields = SHORT | {"data.path": "text.txt"} if re.match("python train.py|difftx train", line) else {}
    return run_command(page_folder, line, *more, fields=fields, code=code)


def flags(line, name):
    return next(word for word in shlex.split(line) if word.startswith(f"--{name}="))


def test_the_page_has_the_expected_files_and_commands():
    shown = ["token_lambda.py", "confident.py", "lion.py", "csv_reader.py", "printed.py"]
    assert list(FILES) == [*shown, "counting.py", "shared_diff.py", "tda.py"]
    page = (DOCS / "extend.md").read_text()
    assert all(name in shown or f"](extensions/{name})" in page for name in FILES)
    assert [len(lines) for lines in COMMANDS] == [6, 2, 2, 5, 1, 3, 1, 1]
    assert len(re.findall(r'^ *[^\s#"]', FILES["token_lambda.py"], re.MULTILINE)) <= 15  # Without docstrings.


def test_added_fields_are_config_fields(page_folder):
    """Load all files of the page together, and set fields that three of them add."""
    line = "python train.py --config=quickstart:tda --print_config --config.optimizer.name=lion"
    extensions = [f"--extension={name}" for name in FILES]
    changes = ["--config.model.tda.beta=2", "--config.eval.confident.probability=0.25"]
    printed = json.loads(run(page_folder, line, *extensions, *changes, "--config.optimizer.lion.b1=0.8"))
    assert printed["model"]["architecture"] == "tda"
    assert printed["model"]["tda"] == {"beta": 2.0}
    assert "shared_diff" not in printed["model"]  # The run does not use that file.
    assert printed["eval"]["confident"] == {"probability": 0.25}
    assert printed["optimizer"]["lion"] == {"b1": 0.8, "b2": 0.99}


@pytest.fixture
def own_registry(monkeypatch):
    """An empty registry for one test, without loaded extensions."""
    monkeypatch.setattr(registry, "_extensions", {})
    monkeypatch.setattr(registry, "_modules", {})
    found = registry.Registry("colour", {})
    monkeypatch.setattr(registry, "COLOURS", found, raising=False)
    return found


def write_extension(path, name):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"from difftx import registry\nregistry.COLOURS.register({name!r})(1)\n")
    return path


def test_files_of_one_name_are_different_extensions(own_registry, tmp_path):
    one, two = (write_extension(tmp_path / name / "same.py", name) for name in ("red", "blue"))
    registry.load_extensions([one, two, one])
    assert list(own_registry) == ["red", "blue"]
    assert len(registry.loaded_extensions()) == 2
    assert own_registry.extension_of("red").path == str(one)
    registry.import_file(one, "--config")  # A recipe that is also an extension.


def test_recorded_extensions_are_required_with_the_same_content(own_registry, tmp_path):
    path = write_extension(tmp_path / "red.py", "red")
    with pytest.raises(
        UserError, match=r"run was made with the extension /else/red\.py; add --extension=/else/red\.py"
    ):
        registry.require_extensions([{"path": "/else/red.py", "sha256": "0" * 64}], "run")
    registry.load_extensions([path])
    (loaded,) = registry.loaded_extensions()
    registry.require_extensions([{"path": "/else/red.py", "sha256": loaded.sha256}], "run")
    registry.require_extensions([{"path": "/else/moved.py", "sha256": loaded.sha256}], "run")
    what = r"another content of .*red\.py, or a module that it imports \(SHA-256 000000000000… → "
    with pytest.raises(UserError, match=what):
        registry.require_extensions([{"path": "/else/red.py", "sha256": "0" * 64}], "run")


def test_a_change_of_a_module_in_its_folder_that_an_extension_imports_is_seen(own_registry, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "arch_of_test.py": "from difftx import registry\nimport helper_of_test\nregistry.COLOURS.register('own')(1)\n",
        "helper_of_test.py": "def rate():\n    from parts_of_test import later\n    return later.RATE\n",
        "parts_of_test/later.py": "RATE = 1\n",
        "unrelated.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    registry.load_extensions([tmp_path / "arch_of_test.py"])
    (recorded,) = registry.loaded_extensions()
    for name, changes in {"unrelated.py": False, "helper_of_test.py": True, "parts_of_test/later.py": True}.items():
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "# Changed.\n")
        assert (registry._extension(tmp_path / "arch_of_test.py") != recorded) == changes
        (tmp_path / name).write_text(before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"registers nothing; see docs/extend\.md"),
        ("x = 1\nraise KeyError('y')", r"own\.py:2: KeyError: y"),
        ("from difftx import registry\nregistry.COLOURS.register('a b')(1)", "a name consists of letters"),
        ("from difftx import registry\nfor _ in 0, 1: registry.COLOURS.register('a')(1)", "'a' exists already"),
    ],
)
def test_a_failing_extension_is_reported_in_one_line(own_registry, tmp_path, text, message):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=message):
        registry.load_extensions([tmp_path / "own.py"])


@pytest.mark.long
def test_a_missing_extension_is_reported_in_one_line(page_folder):
    for changes, message in [
        ([], "'token_lambda': no such architecture."),
        ([], "zero_branch. If a file of yours adds it, name the file with --extension=FILE.py"),
        (["--extension=nowhere.py"], "--extension=nowhere.py: no such file"),
        (["--extension=gs://bucket/a.py"], "this path must be on this machine"),
    ]:
        line = "python train.py --config=quickstart:token_lambda --dry_run"
        assert message in run(page_folder, line, *changes, code=2)


@pytest.mark.long
def test_the_attention_variant_of_the_page_trains_and_is_reported(page_folder):
    library = source_sha256.__wrapped__()
    transformer, token_lambda, train, evaluate, report, generate = COMMANDS[0]
    numbers = [
        int(re.search(r"([\d,]+) parameters", run(page_folder, line))[1].replace(",", ""))
        for line in (transformer, token_lambda)
    ]
    # A layer of the tiny sizes has λ's weight and bias for each of two heads, and the gain of the head norm.
    assert numbers[1] == numbers[0] + 2 * (2 * 32 + 2 + 16)
    run(page_folder, train, "--config.train.steps=4")
    workdir = page_folder / "runs" / "token_lambda"
    (recorded,) = json.loads((workdir / "manifest.json").read_text())["extensions"]
    assert recorded["path"] == str(page_folder / "token_lambda.py")
    assert json.loads((workdir / "checkpoints" / "4" / "manifest.json").read_text())["extensions"] == [recorded]
    run(page_folder, train)
    assert (workdir / "checkpoints" / "6").is_dir()
    run(page_folder, evaluate)
    assert (workdir / "evals" / "sample" / "6.json").is_file()
    run(page_folder, report)
    assert "token_lambda" in (workdir / "report.html").read_text()
    assert run(page_folder, generate).startswith("def ")
    prune = f"python -m difftx checkpoint prune --workdir={workdir}"
    assert run(page_folder, prune, "--extension=token_lambda.py").startswith("kept: ")

    extension = flags(evaluate, "extension")
    for line in (evaluate, report, f"{prune} {extension}"):
        error = run(page_folder, line.replace(extension, ""), code=2)
        assert f"token_lambda was made with the extension {page_folder / 'token_lambda.py'}; add --extension=" in error
        assert error.count("\n") == 1
    assert "token_lambda': no such architecture" in run(page_folder, train.replace(extension, ""), code=2)
    (page_folder / "token_lambda.py").write_text(FILES["token_lambda.py"] + "\n# Changed.\n")
    for line in (evaluate, report):
        error = run(page_folder, line, code=2)
        assert f"was made with another content of {page_folder / 'token_lambda.py'}, or a module" in error
    longer = ["--config.train.steps=8"]
    error = run(page_folder, train, *longer, code=2)
    assert f"changed since the checkpoint of step 6: extension {page_folder / 'token_lambda.py'}, or a" in error
    run(page_folder, train, *longer, "--allow_config_change")
    assert (workdir / "checkpoints" / "8").is_dir()
    run(page_folder, evaluate)
    assert source_sha256.__wrapped__() == library


@pytest.mark.exhaustive  # CI runs the commands of the first variant of the page.
def test_the_other_attention_variants_equal_their_formulas(page_folder):
    """Train and evaluate the variants. Compare them with float64 formulas in a process that has their config fields."""
    for train, evaluate in COMMANDS[1:3]:
        run(page_folder, train)
        run(page_folder, evaluate)
    for name in ("tda", "shared"):
        assert (page_folder / "runs" / name / "evals" / "sample" / "6.json").is_file()
    files = ":".join(str(page_folder / name) for name in ("token_lambda.py", "tda.py", "shared_diff.py"))
    checks = str(ROOT / "tests" / "model" / "extension_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", checks]
    ended = subprocess.run(
        command, cwd=ROOT, env=child_environment(8) | {"EXTENSIONS": files}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout
    assert "13 passed" in ended.stdout


WRONG = [  # Text of the page's file, what is in its place, and the line and error of the message.
    ("return jax", "return 1 / 0 * jax", "25: ZeroDivisionError: division by zero"),
    ("layout.lambda_DH", "layout.undefined", "20: AttributeError: 'Layout' object has no attrib"),
    ("self.bias_H[None, None])", "self.bias_H[None, None])[..., :1]", "11: ValueError: diff_attention requires a real"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), marked(WRONG, fast=WRONG[:1]))
@pytest.mark.parametrize("flag", marked(["--dry_run", "--workdir=runs/new"], fast=["--dry_run"]))
def test_the_error_of_a_variant_is_named_before_the_training(page_folder, right, wrong, message, flag):
    assert FILES["token_lambda.py"].count(right) == 1
    (page_folder / "token_lambda.py").write_text(FILES["token_lambda.py"].replace(right, wrong))
    _, line, *_ = COMMANDS[0]
    error = run(page_folder, line.replace("--dry_run", flag), code=2)
    assert error.startswith("error: ")
    assert f"token_lambda.py:{message}" in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_the_suites_of_the_page_give_their_numbers(page_folder):
    train, listing, evaluate, report, train_with = COMMANDS[3]
    run(page_folder, train)
    (counting,) = COMMANDS[4]
    assert re.search(r"right +(0|0\.25|0\.5|0\.75|1) +0\.5 +share of prompts +higher", run(page_folder, counting))
    assert re.search(r"^confident +Return the share of validation tokens", run(page_folder, listing), re.MULTILINE)
    assert re.search(r"share +\S+ +share of tokens +higher", run(page_folder, evaluate))
    assert "skipped" in run(page_folder, evaluate)
    other = evaluate.replace("0.9", "0.001")
    assert "skipped" not in run(page_folder, other)
    result = json.loads((page_folder / "runs" / "plain" / "evals" / "confident" / "6.json").read_text())
    assert 0.5 < result["numbers"]["share"] <= 1  # Nearly all tokens have a probability of more than a thousandth.
    run(page_folder, report)
    assert "confident" in (page_folder / "runs" / "plain" / "report.html").read_text()
    error = run(page_folder, evaluate.replace("--extension=confident.py", ""), code=2)
    assert "eval.confident: no such field" in error
    assert "If a file of yours adds it, name the file with --extension=FILE.py" in error
    run(page_folder, train_with)
    rows = [json.loads(line) for line in (page_folder / "runs/confident/metrics.jsonl").read_text().splitlines()]
    assert any(row.get("suite") == "confident" and 0 <= row["share"] <= 1 for row in rows)


@pytest.mark.long
def test_optimizer_and_schedule_of_an_extension_train(page_folder):
    train, evaluate, report = COMMANDS[5]
    run(page_folder, train, "--config.train.steps=4")
    error = run(page_folder, train.replace("--extension=lion.py", ""), code=2)
    assert "'lion': no such optimizer" in error
    run(page_folder, train)
    rows = [json.loads(line) for line in (page_folder / "runs" / "lion" / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["learning_rate"] for row in rows if row["split"] == "train"}
    assert rates[1] == pytest.approx(4e-4 / 2, rel=1e-5)  # The warm-up has two updates.
    assert rates[6] == pytest.approx(4e-4 * (2 / 6) ** 0.5, rel=1e-5)
    run(page_folder, evaluate)
    run(page_folder, report)
    line = "python train.py --config=quickstart --dry_run --config.optimizer.schedule=inverse_sqr"
    error = run(page_folder, line, flags(train, "extension"), code=2)
    assert "'inverse_sqr': no such schedule. Did you mean 'inverse_sqrt'?" in error


@pytest.mark.long
def test_a_recipe_may_register_and_a_sweep_forwards_extensions(page_folder):
    (page_folder / "recipe.py").write_text(
        FILES["token_lambda.py"]
        + "\nfrom difftx.configs import quickstart\n\nARG = '{architecture}'\nget_config = quickstart.get_config\n"
    )
    fields = SHORT | {"data.path": "text.txt"}
    changes = [f"--config.{name}={value}" for name, value in fields.items()]
    line = "python -m difftx sweep --config=recipe.py --extension=lion.py --out=runs/sweep --grid"
    names = ["architecture=token_lambda,transformer", "optimizer.name=lion"]
    run(page_folder, line, *names, *changes)
    error = run(page_folder, "python eval.py --workdir=runs/sweep/token_lambda-namelion --suite=loss", code=2)
    assert f"was made with the extension {page_folder / 'lion.py'}" in error
    recorded = json.loads((page_folder / "runs/sweep/transformer-namelion/manifest.json").read_text())["extensions"]
    assert [Path(extension["path"]).name for extension in recorded] == ["lion.py"]
    both = ["--extension=recipe.py", "--extension=lion.py"]
    run(page_folder, "python eval.py --workdir=runs/sweep/token_lambda-namelion --suite=loss", *both)


@pytest.mark.long
def test_the_reader_of_the_page_gives_the_texts_of_its_file(page_folder):
    """The store equals that of the same texts as JSON lines. A reader with other content requires another store."""
    reviews = [f'Film {i}, "quoted",\nand a second line.' for i in range(300)]
    with gzip.open(page_folder / "reviews.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows([["stars", "review"], *([i % 5, text] for i, text in enumerate(reviews))])
    (page_folder / "reviews.jsonl").write_text("".join(json.dumps({"review": text}) + "\n" for text in reviews))
    line = COMMANDS[6][0].replace("reviews.csv", "reviews.csv.gz") + " --workers=1"
    run(page_folder, line)
    run(page_folder, line.replace("reviews.csv.gz", "reviews.jsonl").replace("data/reviews", "data/lines"))
    tokens, expected = (
        {path.name: path.read_bytes() for path in (page_folder / "data" / name).glob("t*/*.tokens")}
        for name in ("reviews", "lines")
    )
    assert tokens == expected
    assert sum(map(len, tokens.values())) > 8000
    run(page_folder, line)
    (page_folder / "csv_reader.py").write_text(FILES["csv_reader.py"] + "# Changed.\n")
    assert "holds a store of other source.extensions" in run(page_folder, line, code=2)
    without = line.replace("--extension=csv_reader.py", "")
    assert "reviews.csv.gz is read whole, without fields" in run(page_folder, without, code=2)


@pytest.mark.long
def test_commands_import_nothing_of_the_current_folder(tmp_path):
    """The folder may be a stranger's run. Its files have names of modules that difftx imports."""
    for name in ("jax", "numpy", "rich", "absl", "matplotlib", "tensorstore", "ml_collections", "msgpack"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')\n")
    command = [sys.executable, "-m", "difftx", "report", "--workdir=.", "--out=page.html"]
    ended = subprocess.run(command, cwd=tmp_path, env=child_environment(1) | {"PYTHONPATH": str(ROOT)}, check=False)
    assert (ended.returncode, (tmp_path / "executed").exists()) == (2, False)


@pytest.mark.parametrize(("options", "is_found"), [([], True), (["-P"], False)])
def test_a_users_file_imports_from_the_current_folder(tmp_path, options, is_found):
    """The folder comes last on the path."""
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "json.py").write_text("raise RuntimeError\n")
    (tmp_path / "own.py").write_text("import helper, json\n")
    code = "import pathlib; from difftx import registry; registry.import_file(pathlib.Path('own.py'), '--config')"
    script = tmp_path / "other" / "script.py"  # The command `difftx` is such a script.
    script.parent.mkdir()
    script.write_text(code)
    command, environment = [sys.executable, *options, script], os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0, "No module named 'helper'" in ended.stderr) == (is_found, not is_found)


@pytest.mark.long
def test_a_tracker_gets_the_numbers_of_the_run(page_folder):
    (train,) = COMMANDS[7]
    tracker = flags(train, "config.logging.trackers")
    run(page_folder, train, tracker, "--config.logging.every_steps=1")
    rows = [json.loads(line) for line in (page_folder / "runs/printed/metrics.jsonl").read_text().splitlines()]
    losses = [f"{row['step']} train/loss {row['loss']}" for row in rows if row["split"] == "train"]
    assert (page_folder / "runs/printed/printed.txt").read_text().splitlines() == losses
