"""`difftx.load`, compared with the suite `loss`, with the attention that suites analyse, and with `generate`."""

import functools
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY, child_environment, write_text
from flax import nnx
from helpers.command_server import commands
from helpers.inference_models import random_params
from helpers.interop_folders import run_of
from model import oracle

import difftx
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.inference.decode import LanguageModel, model_of
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.model.architectures import ARCHITECTURES
from difftx.progress import Work
from difftx.training.run import Run

TEXT = "line 7: the square of 7 is 49."


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """Return a function from an architecture to the directory and the evaluation of a run with random weights."""
    text = write_text(tmp_path_factory.mktemp("text") / "text.txt")

    @functools.cache
    def make(architecture, **fields):
        workdir = tmp_path_factory.mktemp(architecture)
        run = Run.open(config(architecture, data__path=text, mesh__fsdp=8, **fields), workdir)
        params = random_params(run.config, run.mesh, embedding_scale=0.02)
        run_of(LanguageModel(run.config, run.mesh, params, run.tokenizer), workdir)
        return workdir, Evaluation(run, params, Work(enabled=False))

    return make


def test_two_runs_in_one_process_give_the_numbers_of_the_suites(trained):
    (folder, of_diff), (other, of_transformer) = trained("diff"), trained("transformer")
    runs = {difftx.load(folder): of_diff, difftx.load(str(other), step=0): of_transformer}
    for run, evaluation in runs.items():
        (source,) = evaluation.run.data.valid.values()
        with jax.set_mesh(evaluation.run.mesh):
            nll_T = evaluation.scores(source, 32, "rows")[0][0]
        logits_TV = run.logits(source[0]["tokens"].tolist()).astype(np.float64)
        assert logits_TV.shape == (32, run.config.model.embeddings)
        normalizer_T = np.log(np.sum(np.exp(logits_TV), axis=1))
        np.testing.assert_allclose(normalizer_T - logits_TV[np.arange(32), source[0]["targets"]], nll_T, rtol=1e-5)
    assert [run.config.model.architecture for run in runs] == ["diff", "transformer"]


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("diff", {"model__window": 8, "model__window_pattern": "LN"}),
        *(
            pytest.param(name, {"model__head_dim": 8} | oracle.SIZES.get(name, {}), marks=pytest.mark.long)
            for name in ARCHITECTURES
        ),
    ],
)
def test_attention_is_that_of_the_forward_pass(trained, architecture, fields):
    folder, _ = trained(architecture, **fields)
    run = difftx.load(folder)
    tokens_1T = np.array([run.tokenizer.encode_prompt(TEXT)], np.int32)
    length = tokens_1T.shape[1]
    with jax.set_mesh(run._lm.mesh):
        model = model_of(run.config, jax.device_get(run._lm.params))
        rows = nnx.jit(lambda m, x: m.attention_rows(x, np.arange(length)[None], lambda found: found.weights_BCHS))
        weights_LHTS = np.moveaxis(np.asarray(rows(model, tokens_1T))[:, 0], 1, 2)
    for layer in (1, 2):
        found = run.attention(TEXT, layer=layer)
        np.testing.assert_allclose(found.difference, weights_LHTS[layer - 1], atol=1e-5)
        assert (np.triu(np.abs(found.difference), 1) == 0).all()
        if found.a2 is None:
            assert not ARCHITECTURES[architecture].subtracts
            continue
        np.testing.assert_allclose(found.a1 - found.lam * found.a2, found.difference, atol=1e-5)
        np.testing.assert_allclose([found.a1.sum(-1), found.a2.sum(-1)], 1, atol=1e-5)
        has_window = layer == 1 and "model__window" in fields
        assert (np.tril(found.a1, -8) == 0).all() == has_window
        assert found.a1.shape == found.a2.shape == (run.config.model.num_heads, length, length)


@pytest.mark.long
def test_the_greedy_text_is_that_of_generate_and_results_are_on_the_host(trained):
    folder, _ = trained("diff")
    run = difftx.load(folder)
    prompt = run.tokenizer.encode_prompt(TEXT[:8])
    expected = generate(run._lm, [Request(prompt=prompt, new_tokens=6, seed=0)], GREEDY)[0].text
    assert run.generate(TEXT[:8], new_tokens=6, temperature=0) == expected
    assert run.generate(TEXT[:8], new_tokens=6, seed=1) != run.generate(TEXT[:8], new_tokens=6, seed=2)
    assert type(run.logits(TEXT)) is np.ndarray
    assert type(run.logits(TEXT)[0, 0]) is np.float32


def test_mistakes_are_one_line(trained):
    run = difftx.load(trained("diff")[0])
    for call, message in (
        (lambda: run.logits(""), "the text has 0 tokens; give it 1 to data.sequence_length=32"),
        (lambda: run.logits("x" * 33), "the text has 33 tokens; give it 1 to data.sequence_length=32"),
        (lambda: run.logits([264]), "the text has token ids outside of 0 … 263"),
        (lambda: run.attention(TEXT, layer=0), "layer=0 must lie in 1 … 2"),
        (lambda: run.attention(TEXT, layer=3), "layer=3 must lie in 1 … 2"),
        (lambda: run.generate(TEXT, new_tokens=9), "new_tokens=9 does not fit the model's context"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            call()


@pytest.mark.long
def test_a_run_with_an_extension_in_a_process_of_the_user(tmp_path, text_file):
    (tmp_path / "mine.py").write_text(
        "from difftx.model.architectures import ARCHITECTURES\n"
        "from difftx.model.attention import Attention\n"
        "@ARCHITECTURES.register('mine')\n"
        "class Mine(Attention): pass\n"
    )
    flags = [f"--config.{name}={value}" for name, value in (TINY | {"data.path": text_file}).items()]
    workdir, environment = tmp_path / "run", child_environment(1) | {"PYTHONPATH": str(ROOT)}
    extension = [f"--extension={tmp_path / 'mine.py'}", "--config.model.architecture=mine"]
    train = ["train", "--config=quickstart:transformer", f"--workdir={workdir}", *flags, *extension]
    assert commands().run(["difftx", *train], environment=environment).returncode == 0
    script = f"import difftx; print(difftx.load({str(workdir)!r}, extensions=%s).generate('a', new_tokens=3))"
    call = [sys.executable, "-c", script % [str(tmp_path / "mine.py")]]
    subprocess.run(call, env=environment, cwd=tmp_path, check=True, capture_output=True)
    without = subprocess.run([sys.executable, "-c", script % []], env=environment, capture_output=True, text=True)
    assert f"was made with the extension {tmp_path / 'mine.py'}; add " in without.stderr.splitlines()[-1]
