"""Paths that the system rejects, in every command: one line, and exit code 2 if the user can correct the error."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment, write_text
from helpers.command_server import CommandServer
from helpers.report_runs import write_run

pytestmark = pytest.mark.long

BOUND_BY_MODES = [
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
]


@pytest.fixture(scope="module")
def run():
    """Yield a function from command lines to their exit codes and outputs. File modes apply to root too."""
    drop = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores modes, and there is no setpriv to give that up")
        drop = BOUND_BY_MODES
    server = CommandServer(drop)
    yield lambda commands: [(ended.returncode, ended.stdout + ended.stderr) for ended in server.run_together(commands)]
    server.stop()


def check(run, cases):
    """Run commands, and assert that each ends with its exit code and one error line that contains its text."""
    results = run([command for command, _, _ in cases])
    wrong = []
    for (command, code, text), (ended, output) in zip(cases, results, strict=True):
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        if ended != code or len(errors) != 1 or text not in errors[0] or "Traceback" in output:
            wrong.append(f"{' '.join(map(str, command))}: {ended}\n{output[-2000:]}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, and with paths to which the operating system refuses to write."""
    folder = tmp_path_factory.mktemp("refused")
    write_text(folder / "text.txt")
    (folder / "file").write_text("a file\n")
    (folder / "folder").mkdir()
    (folder / "broken").symlink_to(folder / "nothing")
    (folder / "loop").symlink_to(folder / "loop")
    for name, mode in (("read_only", 0o555), ("closed", 0o000)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    yield folder
    for name in ("read_only", "closed"):
        (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def bad_folders(place):
    """Return the paths where no folder can be created, each with the text of its error."""
    return {
        place / "file": "Not a directory; name a folder",
        place / "file" / "below": "Not a directory; name a folder",
        place / "read_only": "Permission denied",
        place / "read_only" / "new" / "run": "Permission denied",
        place / "closed" / "new": "Permission denied",
        place / "broken": "Broken symbolic link",
        place / "loop" / "run": "symbolic links; use another path",
        place / ("n" * 300): "File name too long; use another path",
        "/sys/difftx": "/sys",
        "/proc/difftx/run": "/proc: No file can be created there",
    }


def test_no_command_writes_into_a_bad_folder(run, place, bad_folders, config):
    runs = place / "runs"
    write_run(runs / "one", config(), layers=2)
    flags = [f"--config.{name}={value}" for name, value in (TINY | {"data.path": place / "text.txt"}).items()]
    train = ["train.py", "--config=configs/quickstart.py", *flags]
    before = sorted(place.glob("*"))
    cases = [([*train, f"--workdir={bad}"], 2, why) for bad, why in bad_folders.items()]
    cases += [([*train, "--dry_run", f"--workdir={bad}"], 2, why) for bad, why in list(bad_folders.items())[:1]]
    commands = [
        ["eval.py", f"--curves={runs}/*"],
        ["eval.py", f"--scaling={runs}/*"],
        ["difftx", "sweep", "--config=configs/quickstart.py", "--grid", "seed=0,1"],
        ["difftx", "prepare", f"--input={place / 'text.txt'}", "--tokenizer=bytes"],
    ]
    for bad in (place / "file", place / "read_only" / "new", "/proc/difftx/run"):
        cases += [([*command, f"--out={bad}"], 2, bad_folders.get(bad, "Permission denied")) for command in commands]
        report = ["difftx", "report", f"--workdir={runs / 'one'}", f"--out={bad}/report.html"]
        cases.append((report, 2, bad_folders.get(bad, "Permission denied")))
    plan = ["difftx", "plan", "--config=configs/quickstart.py", "--topology=cpu:1"]
    report = ["difftx", "report", f"--workdir={runs / 'one'}", f"--out={place / 'folder'}"]
    convert = ["difftx", "convert", "--from=difftx", "--to=hf", f"--input={runs / 'one'}", "--out=/sys/difftx"]
    cases += [(report, 2, "Is a directory; name a file"), (convert, 2, "/sys")]
    cases += [([*plan, f"--json={place / 'read_only' / 'a.json'}"], 2, "Permission denied")]
    cases += [([*plan, f"--json={place / 'folder'}"], 2, "Is a directory; name a file")]
    check(run, cases)
    assert sorted(place.glob("*")) == before


def test_every_command_reports_unreadable_paths(run, place, config):
    unreadable = write_run(place / "unreadable", config(), layers=2)
    (unreadable / "metrics.jsonl").chmod(0)
    closed = place / "closed" / "run"
    out, workdir = f"--out={place / 'new'}", f"--workdir={closed}"
    curves = ["eval.py", f"--curves={place}/unread*", f"--out={place / 'folder'}"]
    cases = [
        # Not a user error: reads of a run's files are retried, and a restart may help after that.
        (curves, 1, "metrics.jsonl cannot be read: Permission denied"),
        (["eval.py", workdir, "--suite=loss"], 1, "config.json cannot be read: Permission denied"),
        (["eval.py", f"--workdir={place / 'file'}", "--suite=loss"], 2, "no config.json there"),
        (["difftx", "generate", workdir, "--prompt=a"], 1, "Permission denied"),
        (["difftx", "checkpoint", "ls", workdir], 1, "Permission denied"),
        (["difftx", "checkpoint", "ls", f"--workdir={place / 'file'}"], 2, "is not a folder; move it away"),
        (["difftx", "data", "verify", str(closed)], 1, "Permission denied"),
        (["difftx", "data", "show", str(closed), "--row=0"], 1, "Permission denied"),
        (["difftx", "convert", "--from=difftx", "--to=hf", f"--input={closed}", out], 2, "Permission"),
        (["difftx", "prepare", f"--input={closed}", "--tokenizer=bytes", out], 2, "Permission"),
        (["train.py", f"--config={closed}.py", f"--workdir={place / 'new'}"], 2, "Permission denied"),
        (["difftx", "generate", f"--workdir={unreadable}", f"--prompts={place / 'folder'}"], 2, "Is a directory"),
    ]
    check(run, cases)


def test_unknown_stores_are_rejected_before_anything_is_written(run, place, tmp_path):
    url = "hdfs://bucket/run"
    train = ["train.py", "--config=configs/quickstart.py"]
    fields = ["data.path", "data.cache_path", "checkpoint.init_from", "eval.bigrams_path", "eval.needle.haystack"]
    fields += ["eval.harness.data_path", "data.tokenizer"]
    sweep = ["difftx", "sweep", "--config=configs/quickstart.py", "--grid", "seed=0"]
    prepare = ["difftx", "prepare", "--tokenizer=bytes"]
    commands = [
        [*train, f"--workdir={url}"],
        [*train, "--workdir=https://bucket/run"],
        *([*train, f"--workdir={tmp_path / 'run'}", f"--config.{field}={url}"] for field in fields),
        ["eval.py", f"--workdir={url}", "--suite=loss"],
        ["difftx", "report", f"--workdir={place},{url}"],
        ["eval.py", f"--curves={url}/*", f"--out={tmp_path}"],
        ["eval.py", f"--scaling={url}/*", f"--out={tmp_path}"],
        ["eval.py", "--curves=runs/*", f"--out={url}"],
        [*sweep, f"--out={url}"],
        [*prepare, f"--input={url}", f"--out={tmp_path / 'store'}"],
        [*prepare, f"--input={place / 'text.txt'}", f"--out={url}"],
        [*prepare, f"--input={place / 'text.txt'}", f"--valid_input={url}", f"--out={tmp_path / 'store'}"],
        ["difftx", "data", "verify", url],
        ["difftx", "data", "bigrams", str(place), url, f"--out={tmp_path / 'bigrams'}"],
        ["difftx", "checkpoint", "ls", f"--workdir={url}"],
        ["difftx", "generate", f"--workdir={url}", "--prompt=a"],
        ["difftx", "convert", "--from=difftx", "--to=hf", f"--input={url}", f"--out={tmp_path / 'out'}"],
        ["difftx", "convert", "--from=difftx", "--to=hf", f"--input={place}", f"--out={url}"],
        ["difftx", "plan", "--config=configs/quickstart.py", "--topology=cpu:1", f"--json={url}"],
    ]
    check(run, [(command, 2, "://bucket/run") for command in commands])
    assert not list(tmp_path.iterdir())
    assert not list(ROOT.glob("hdfs:*"))


def test_user_errors_name_the_fix(run, place, tmp_path):
    configs = {
        "syntax": "x = 1\ndef get_config(:\n",
        "raises": "def get_config():\n    return 1 / 0\n",
        "none": "x = 1\n",
        "imports": "x = 1\nimport no_such_module\n",
    }
    for name, text in configs.items():
        (tmp_path / f"{name}.py").write_text(text)
    flags = [f"--config.{name}={value}" for name, value in (TINY | {"data.path": place / "text.txt"}).items()]
    start = ["train.py", f"--workdir={tmp_path / 'run'}"]
    train = [*start, "--config=configs/quickstart.py", *flags]
    on = "--config.model.attention_implementation="
    only = "use one of auto, reference, xla"
    grid = ["difftx", "sweep", "--config=configs/quickstart.py", f"--out={tmp_path / 'sweep'}", "--grid"]
    before = {path.name for path in tmp_path.iterdir()} | {"__pycache__"}
    check(
        run,
        [
            *(
                ([*train, f"{on}{name}"], 2, f"'{name}': this backend requires a GPU, and JAX runs on CPU here; {only}")
                for name in ("pallas_gpu", "cudnn", "cudnn_wide")
            ),
            ([*train, f"{on}pallas_tpu"], 2, f"requires a TPU, and JAX runs on CPU here; {only}"),
            ([*start, "--config=configs/quickstart.py:transformer", *flags, f"{on}splash"], 2, "requires a TPU"),
            ([*train, "--config.mesh.tensor=8"], 2, "multiply to the 1 devices here; set mesh.tensor=1"),
            ([*grid, "optimizer.lr=1,2"], 2, "Did you mean 'optimizer.learning_rate'?"),
            ([*start, f"--config={tmp_path / 'syntax.py'}"], 2, f"{tmp_path / 'syntax.py'}:2: SyntaxError: "),
            ([*start, f"--config={tmp_path / 'raises.py'}"], 2, f"{tmp_path / 'raises.py'}:2: ZeroDivisionError: "),
            ([*start, f"--config={tmp_path / 'none.py'}"], 2, f"{tmp_path / 'none.py'}: AttributeError: "),
            ([*start, f"--config={tmp_path / 'imports.py'}"], 2, f"{tmp_path / 'imports.py'}:2: ModuleNotFoundError: "),
        ],
    )
    assert {path.name for path in tmp_path.iterdir()} <= before


def test_a_platform_that_jax_lacks_is_reported_in_one_line(tmp_path):
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}"]
    environment = child_environment(1) | {"JAX_PLATFORMS": "rocm"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    line = (
        f"error: JAX_PLATFORMS=rocm: JAX has no device of that platform here.*{sys.executable} -m pip install -e .*\n"
    )
    assert re.fullmatch(line, result.stderr)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_that_exceeds_the_memory_warns(run, place):
    flags = [f"--config.{name}={value}" for name, value in (TINY | {"data.path": place / "text.txt"}).items()]
    train = ["train.py", "--config=configs/quickstart.py", "--dry_run", *flags]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = 2 ** (memory.bit_length() - 5)  # A token's activations are more than 64 bytes, and less than 64 KiB.
    large = [*train, f"--config.train.global_batch_tokens={tokens}"]
    wide = [*train, "--config.model.mlp_dim=1000000000", "--config.train.global_batch_tokens=32"]
    fits, too_large, wide = run([train, large, wide])
    assert [code for code, _ in (fits, too_large, wide)] == [0, 0, 0], (fits, too_large, wide)
    assert "warning" not in fits[1]
    assert re.search(r"warning  about .* exceed the .*iB of this machine; raise train.accumulation, ", too_large[1])
    assert re.search(r"warning  about .* exceed the .*iB of this machine; use a smaller model", wide[1])
