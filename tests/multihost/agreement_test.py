"""Real processes that are started with different configs, data or code. None takes a step, and all report why."""

import re
import shutil

import pytest
from conftest import ROOT, child_environment, write_text
from helpers.command_server import commands
from helpers.processes import free_port

pytestmark = pytest.mark.long

HINT = "start every process with the same command, packages and data"


def errors(group, codes=(2, 2)):
    """Wait for all processes, check their exit codes, and return the only error line of each, without a traceback."""
    ended = [group.wait(process) for process in group.running]
    assert tuple(code for code, _ in ended) == codes, ended
    for _, text in ended:
        assert "Traceback" not in text
        assert len(re.findall("^error: ", text, re.MULTILINE)) == 1, text
    return [next(line for line in text.splitlines() if line.startswith("error: ")) for _, text in ended]


@pytest.mark.parametrize(
    ("field", "value", "difference"),
    [
        ("optimizer.learning_rate", 0.25, r"optimizer\.learning_rate=0\.25, but process 0 has [\d.]+"),
        ("mesh.fsdp", 3, r"mesh\.fsdp=3, but process 0 has -1"),  # Otherwise, one process would fail or hang.
    ],
)
def test_processes_with_different_configs_end_before_the_first_step(started, field, value, difference):
    two = started(own_flags={1: [f"--config.{field}={value}"]})
    first, second = errors(two)
    assert first == second
    assert re.fullmatch(rf"error: process 1 of 2 \(.*, pid {two.running[1].pid}\): {difference}; {HINT}", first)
    assert not two.metrics.parent.exists()


def test_processes_with_different_data_end_before_the_first_step(started, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} and {i * i} follow each other in another text.\n" for i in range(4000)))
    two = started(own_flags={1: [f"--config.data.path={other}"]})
    first, second = errors(two)
    assert first == second
    sha256 = "[0-9a-f]{12}…"
    assert re.fullmatch(
        rf"error: process 1 of 2 \(.*\): data: source train={sha256}, but process 0 has {sha256}"
        rf" \(and 1 more fields\); {HINT}",
        first,
    )
    assert not two.metrics.parent.exists()


def test_copy_of_the_data_in_another_folder_does_not_count_as_a_difference(started, tmp_path):
    copy = tmp_path / "copy" / "text.txt"
    copy.parent.mkdir()
    write_text(copy)
    own = [f"--config.data.path={copy}", f"--config.data.cache_path={tmp_path / 'cache'}"]
    two = started(train__steps=3, own_flags={1: own})
    for process in (0, 1):
        code, text = two.wait(process)
        assert code == 0, text


@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_cannot_open_its_data_ends_the_other_too(started, tmp_path, missing):
    path = tmp_path / "nowhere" / "text.txt"
    two = started(own_flags={missing: [f"--config.data.path={path}"]})
    found = errors(two)
    assert re.fullmatch(rf"error: data.path='{path}': .*", found[missing])
    who = rf"process {missing} of 2 \(.*, pid {two.running[missing].pid}\)"
    assert re.fullmatch(rf"error: {who}: {re.escape(found[missing].removeprefix('error: '))}", found[1 - missing])
    assert not two.metrics.parent.exists()


# Script of both processes. Process 1 is killed while it opens its data.
KILLED = """
import os, runpy, signal, sys
from difftx.training import run
if sys.argv[sys.argv.index("--process") + 1] == "1":
    run.load_sources = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_that_is_killed_while_it_opens_its_data_is_named(started):
    two = started(multihost__barrier_timeout_seconds=60, script=("-c", KILLED, "train.py"))
    assert two.wait(1)[0] == -9
    code, text = two.wait(0)
    assert code == 1
    assert re.search(rf"error: process 0 stops: process 1 of 2 \(.*pid {two.running[1].pid}.*\) has been silent", text)


def test_processes_with_different_extensions_end_before_the_first_step(started, tmp_path):
    """Each process has its extension in another folder, with a suite of the same name."""
    own = {}
    for process in (0, 1):
        path = tmp_path / f"host{process}" / "own.py"
        path.parent.mkdir()
        suite = "from difftx.evals.suite import Suite, register_suite\nregister_suite('own', Suite(evaluate=print))\n"
        path.write_text(f"{suite}# On host {process}.\n")
        own[process] = [f"--extension={path}"]
    first, second = errors(started(own_flags=own))
    assert first == second
    assert re.search(
        r"process 1 of 2 \(.*\): extension 1, own\.py=[0-9a-f]{12}…, but process 0 has [0-9a-f]{12}…; ", first
    )


def test_different_sources_of_difftx_are_detected(started, tmp_path):
    """Process 1 has another checkout, in which one comment differs."""
    for name in ("difftx", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path / "checkout")
    with (tmp_path / "checkout" / "difftx" / "training" / "loss.py").open("a") as file:
        file.write("# An experiment.\n")
    script = "import os, runpy, sys\nsys.argv = sys.argv[1:]\n" + (
        f"if sys.argv[sys.argv.index('--process') + 1] == '1':\n    sys.path[0] = {str(tmp_path / 'checkout')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    two = started(script=("-c", script, "train.py"))
    first, second = errors(two)
    assert first == second
    sha256 = "[0-9a-f]{12}…"
    difference = f"difftx source={sha256}, but process 0 has {sha256}"
    assert re.fullmatch(rf"error: process 1 of 2 \(.*\): {difference}; {HINT}", first)


def run_both(command, own):
    together = ["--coordinator", f"localhost:{free_port()}", "--processes=2"]
    both = [[*command, *together, f"--process={i}", *own[i]] for i in range(2)]
    return commands().run_together(both, environment=child_environment(2))


def test_eval_and_generate_compare_their_flags(started):
    one = started(count=1, train__steps=3)
    assert one.wait(0)[0] == 0, one.logs[0].read_text()
    workdir = f"--workdir={one.metrics.parent}"
    generate = ["difftx", "generate", workdir, "--temperature=0", "--new_tokens=2"]
    mesh = ["--mesh.data=2", "--mesh.fsdp=2"]
    cases = [
        (["eval.py", workdir, "--suite=loss", *mesh], ([], ["--eval.loss_tokens=256"]), "eval.loss_tokens=256"),
        (["eval.py", workdir, *mesh], (["--suite=loss"], ["--suite=recall"]), "--suite='recall'"),
        ([*generate, *mesh], (["--prompt=line"], ["--prompt=line one"]), "--prompt='line one'"),
        ([*generate, *mesh], (["--prompt=line", "--top_k=5"], ["--prompt=line"]), "--top_k=None"),
    ]
    for command, own, difference in cases:
        ended = run_both(command, own)
        assert [process.returncode for process in ended] == [2, 2], ended
        lines = [[x for x in process.stderr.splitlines() if x.startswith("error: ")] for process in ended]
        assert lines[0] == lines[1]
        assert len(lines[0]) == 1
        assert f": {difference}, but process 0 has " in lines[0][0]


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        ({"JAX_DEFAULT_PRNG_IMPL": "rbg"}, "jax_default_prng_impl='rbg', but process 0 has 'threefry2x32'"),
        (
            {"XLA_FLAGS": f"{child_environment(2)['XLA_FLAGS']} --xla_cpu_enable_fast_math=true"},
            "XLA_FLAGS --xla_cpu_enable_fast_math='true', but process 0 has None",
        ),
        ({"JAX_COMPILATION_CACHE_DIR": "/tmp/difftx own cache", "JAX_LOG_COMPILES": "false"}, None),
    ],
)
def test_settings_of_jax_that_change_numbers_are_compared(started, own, difference):
    """The settings are variables of the environment, so `-c` starts each process as a new interpreter."""
    run = "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    script = ("-c", run, "train.py")
    two = started(script=script, devices=2, train__steps=3, own_environment={1: own})
    if difference is None:
        assert [two.wait(process)[0] for process in (0, 1)] == [0, 0]
    else:
        assert f": {difference}; {HINT}" in errors(two)[0]


# Without the comparison of settings. Process 1 then changes its replica of the weights in step 1 if its flag says so.
REPLICAS = """
import dataclasses, runpy, sys, jax, numpy
from difftx.training import loop, run
run.jax_settings = dict
take_step, process = loop.Training._take_step, sys.argv[sys.argv.index("--process") + 1]
def corrupted(x):
    shards = [jax.device_put(numpy.asarray(s.data) + 1e-6, s.device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
def take_step_and_corrupt(self, reporter):
    take_step(self, reporter)
    if process == "1" and self._state.step == 1:
        train = self._state.train
        self._state.train = dataclasses.replace(train, params=jax.tree.map(corrupted, train.params))
if sys.argv.pop(1) == "corrupt":
    loop.Training._take_step = take_step_and_corrupt
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "own", "when", "steps"),
    [
        ("-", {"JAX_DEFAULT_PRNG_IMPL": "rbg"}, "start", []),
        ("corrupt", {}, "checkpoint of step 2", []),
        ("-", {}, None, [2, 3]),
    ],
)
def test_replicas_of_the_weights_are_compared_at_the_start_and_before_each_save(started, script, own, when, steps):
    two = started(
        script=("-c", REPLICAS, script, "train.py"),
        own_environment={1: own},
        devices=2,
        mesh__data=2,
        train__steps=3,
        checkpoint__every_steps=2,
    )
    if when is None:
        assert [two.wait(process)[0] for process in (0, 1)] == [0, 0]
    else:
        line = rf"process 1 of 2 .*: weights at the {when}, sum of bits=\[\d+\], but process 0 has \[\d+\]; {HINT}"
        assert all(re.search(line, text) for text in errors(two))
    folder = two.metrics.parent / "checkpoints"
    assert sorted(int(path.name) for path in folder.glob("[0-9]*")) == steps
