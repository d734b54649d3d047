"""`difftx.train`, `difftx.load` and `difftx.evaluate`, compared with the commands, with suites and with each other."""

import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, child_environment, write_text
from helpers.command_server import commands
from helpers.interop_folders import export
from helpers.pages import blocks

import difftx
from difftx.data.sources import load_sources
from difftx.errors import RunError, UserError
from difftx.parallel.multihost import Interrupt
from difftx.training import loop
from difftx.training.metrics import read_metrics

TEXT = "line 7: the square of 7 is 49."
FIELDS = TINY | {"mesh.fsdp": "8", "eval.loss_tokens": "600", "logging.every_steps": "1", "logging.trackers": ""}
NOT_OF_THE_MODEL = {"tokens_per_second", "step_seconds", "data_wait_seconds"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    write_text(folder / "text.txt")
    return folder


def trained(folder, name, **fields):
    """Train a run in Python. The values have the types that users write."""
    model = {name.partition(".")[2]: int(value) for name, value in FIELDS.items() if name[:8] == "model.d_"}
    others = {name: value for name, value in FIELDS.items() if name not in ("model.d_model", "train.steps")}
    named = {"data": {"path": folder / "text.txt"}, "model": model, "steps": 6} | others | fields
    return difftx.train("quickstart:diff", folder / name, **named)


@pytest.fixture(scope="module")
def run(folder):
    """A run that another thread than the main one has trained, as in some notebooks and servers."""
    found = []
    thread = threading.Thread(target=lambda: found.append(trained(folder, "python")))
    thread.start()
    thread.join()
    return found[0]


def metrics_of(workdir):
    rows = list(read_metrics(workdir / "metrics.jsonl"))
    rows = [row for row in rows if row["split"] in ("train", "valid")]
    return [{name: value for name, value in row.items() if name not in NOT_OF_THE_MODEL} for row in rows]


def test_train_gives_the_metrics_weights_and_config_of_the_command(run, folder):
    flags = [f"--config.{name}={value}" for name, value in (FIELDS | {"data.path": folder / "text.txt"}).items()]
    command = ["difftx", "train", "--config=quickstart:diff", f"--workdir={folder / 'command'}", *flags]
    ended = commands().run(command, environment=child_environment(8))
    assert ended.returncode == 0, ended.stderr
    rows = metrics_of(run.workdir)
    assert rows == metrics_of(folder / "command")
    assert [row["step"] for row in rows if row["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    other = difftx.load(folder / "command")
    assert (run.step, other.step) == (6, 6)
    jax.tree.map(np.testing.assert_array_equal, run._lm.params, other._lm.params)
    assert run.config == other.config
    assert run.tokenizer.decode(run.tokenizer.encode_prompt(TEXT)) == TEXT


def test_a_signal_stops_the_training_and_the_same_call_resumes_it(run, folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Interrupt, "requested", lambda self, step: step >= 3)
        with pytest.raises(RunError, match="stopped: a signal stopped the training; call"):
            trained(folder, "stopped")
    assert difftx.load(folder / "stopped").step == 3
    resumed = trained(folder, "stopped")
    jax.tree.map(np.testing.assert_array_equal, resumed._lm.params, run._lm.params)
    monkeypatch.setattr(loop, "train", lambda *args, **options: 1)
    with pytest.raises(RunError, match="stopped after too many bad steps; metrics"):
        trained(folder, "stopped")


def test_evaluate_and_logprobs_give_the_numbers_of_the_suite(run):
    numbers = difftx.evaluate(run, "loss", again=True)["loss"]
    stored = json.loads((run.workdir / "evals" / "loss" / "6.json").read_text())
    assert numbers == stored["numbers"]
    assert numbers["loss"].unit == "nats per token"
    (source,) = load_sources(run.config.data, run.tokenizer).valid.values()
    rows = [source[index] for index in range(600 // 32)]
    values = run.logprobs([[*row["tokens"], row["targets"][-1]] for row in rows])
    sums = [float(-row.sum(dtype=np.float64)) for row in values]
    assert sum(sums) / sum(map(len, values)) == numbers["loss"]
    assert difftx.evaluate(run, ["loss"], loss_tokens=64)["loss"]["loss"] == sum(sums[:2]) / 64


def test_logprobs_are_those_of_the_logits(run):
    texts = [TEXT, TEXT[:9], [1, 2], TEXT + "\n" * 2]
    for text, values in zip(texts, run.logprobs(texts), strict=True):
        ids = np.array(run.tokenizer.encode_prompt(text) if isinstance(text, str) else text)
        logits_TV = run.logits(text)[:-1].astype(np.float64)
        expected = logits_TV[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits_TV).sum(1))
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        assert (values.dtype, type(values)) == (np.float32, np.ndarray)
    assert run.logprobs([]) == []


def test_the_module_has_no_mesh_and_its_hook_patches_layers(run):
    tokens = jnp.array([run.tokenizer.encode_prompt(TEXT)])
    call = jax.jit(lambda model, tokens: model(tokens))
    logits, statistics = call(run.model, tokens)
    np.testing.assert_allclose(logits[0], run.logits(TEXT), atol=1e-5)
    assert statistics["lambda"].shape == (2,)
    assert {type(leaf.sharding) for leaf in jax.tree.leaves(run.model)} == {jax.sharding.SingleDeviceSharding}
    grads = jax.jit(jax.grad(lambda model: model(tokens)[0].sum()))(run.model)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    residuals = run.model(tokens, hook=lambda x, layer: (x, x))[1]["hook"]
    other = jnp.array([run.tokenizer.encode_prompt(TEXT.replace("7", "8"))])

    @jax.jit
    def patched(model, tokens, residuals, at):
        return model(tokens, hook=lambda x, layer: (jnp.where(layer == at, residuals[layer - 1], x), layer))

    second, seen = patched(run.model, other, residuals, 2)
    np.testing.assert_array_equal(seen["hook"], [1, 2])
    np.testing.assert_allclose(second, logits, atol=1e-6)
    of_other = call(run.model, other)[0]
    assert (patched(run.model, other, residuals, 3)[0] == of_other).all()
    assert not np.allclose(of_other, logits)


def test_an_exported_folder_is_the_run(run, folder):
    out = export(run.workdir, folder / "exported")
    other = difftx.load(out)
    np.testing.assert_array_equal(other.logits(TEXT), run.logits(TEXT))
    assert other.generate(TEXT[:9], new_tokens=8, temperature=0) == run.generate(TEXT[:9], new_tokens=8, temperature=0)
    assert (other.step, other.config.data.sequence_length) == (None, 32)
    for call, message in (
        (lambda: difftx.load(out, step=3), "step=3 selects a checkpoint of a run, and .* is the folder of a model"),
        (lambda: difftx.load(out, weights="ema"), "weights='ema' selects a checkpoint of a run"),
        (lambda: difftx.evaluate(other, "loss"), "run: an exported folder has no data"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    (out / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="exported': the folder has neither tokenizer"):
        difftx.load(out)


def test_mistakes_are_one_line(run, folder, tmp_path):
    def train(**fields):
        return lambda: difftx.train("quickstart:diff", tmp_path / "run", **fields)

    for call, message in (
        (train(step=3), "step=3: no such field. Did you mean 'steps'?"),
        (train(hidden_size=3), "hidden_size: no such field. Did you mean 'model.d_model'?"),
        (train(model={"d_modle": 3}), "model.d_modle: no such field. Did you mean 'd_model'?"),
        (train(steps="many"), "train.steps='many': expected an integer"),
        (train(suites=["lose"]), "'lose': no such suite. Did you mean 'loss'?"),
        (
            train(batch_size=32),
            "Did you mean 'train.global_batch_tokens' (in tokens: sequences × data.sequence_length)?",
        ),
        (
            lambda: difftx.train({"train": {"steps": 3}}, tmp_path / "run"),
            'config: name a recipe, such as "quickstart:d',
        ),
        (lambda: difftx.load(run.workdir, step="3"), "step='3': expected an integer"),
        (lambda: difftx.evaluate(str(run.workdir), "loss"), "expected a run, which difftx.load returns"),
        (lambda: run.logits(["a", "b"]), "text=['a', 'b']: expected one text, or its token ids"),
        (lambda: difftx.load(tmp_path / "none"), "no config.json there, so it is not a run"),
        (lambda: difftx.load(run.workdir, extensions="own.py"), "extensions='own.py' is one path; give a list, such"),
        (lambda: difftx.evaluate(run, "loss", lost_tokens=3), "eval.lost_tokens: no such field. Did you mean"),
        (lambda: run.logprobs(TEXT), "is one text; give a list, such as [text]"),
        (lambda: run.generate(TEXT, stop="\n\n"), r"stop='\n\n' is one string; give a list, such as ['\n\n']"),
        (lambda: run.logprobs(["x"]), "the text has 1 tokens; give it 2 to data.sequence_length + 1=33"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            call()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_code_of_the_page_and_of_the_readme_runs(folder, monkeypatch):
    names = {}
    monkeypatch.chdir(folder)
    train = difftx.train
    small = {name: value for name, value in FIELDS.items() if name not in ("train.steps", "eval.loss_tokens")}
    small |= {"data.path": str(folder / "text.txt"), "data.sequence_length": "128", "train.global_batch_tokens": "1024"}
    monkeypatch.setattr(difftx, "train", lambda *args, **fields: train(*args, **small | fields), raising=False)
    for block in blocks("python.md", "python"):
        exec(block, names)
    assert names["error"] < 1e-6
    assert names["effects"].shape == (2, names["clean"].shape[1])
    difference = names["clean_logits"][0, -1, names["answer"]] - names["clean_logits"][0, -1, names["other"]]
    scale = np.abs(names["clean_logits"]).max()  # The difference itself is nearly 0.
    np.testing.assert_allclose(names["effects"][-1, -1], difference, atol=1e-5 * scale, rtol=0)
    np.testing.assert_array_equal(names["state"]["params.embedding_VD"], names["run"].model.embedding_VD)
    assert names["loss"] == json.loads((folder / "runs/python/evals/loss/200.json").read_text())["numbers"]["loss"]
    (folder / "runs/quickstart").mkdir()
    (folder / "runs/quickstart/diff").symlink_to("../python")
    readme = {}
    exec(blocks("../README.md", "python")[1], readme)
    assert readme["loss"] == difftx.evaluate(readme["run"], "loss")["loss"]["loss"]
    assert readme["weights"].a1.shape == readme["weights"].difference.shape
