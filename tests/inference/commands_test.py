"""The command `python -m difftx generate`, as a user calls it."""

import argparse
import json

import jax
import numpy as np
import pytest
from conftest import child_environment
from helpers.command_server import commands
from helpers.inference_models import language_model

from difftx.commands.generate import _read_prompts, main
from difftx.errors import UserError, printable
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.run import write_run_files
from difftx.training.state import init_state


@pytest.fixture
def workdir(config, mesh_of, tmp_path):
    """Return a run directory with the files that generation reads, as trained on one device."""
    lm = language_model(config, mesh_of(), checkpoint__every_steps=1)
    write_run_files(tmp_path, lm.config)
    checkpointer = Checkpointer(tmp_path, lm.config.checkpoint)
    with jax.set_mesh(lm.mesh):
        state = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), jax.eval_shape(lambda: init_state(lm.config)))
    loader = {"examples": 0, "signature": {"tokenizer": lm.tokenizer.fingerprint}}
    checkpointer.save(type(state)(state.step, lm.params, state.opt_state), loader, lm.config)
    checkpointer.close()
    return tmp_path


def run(devices, *flags):
    return commands().run(["difftx", "generate", *flags], environment=child_environment(devices))


@pytest.mark.long
def test_a_prompt_and_a_file_of_prompts_on_other_meshes(workdir):
    flags = [
        f"--workdir={workdir}",
        "--new_tokens=20",
        "--temperature=1",
        "--top_p=0.9",
        "--seed=3",
        "--stop=\ufffd\ufffd",
    ]
    result = run(1, *flags, "--prompt=é 1")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert text.startswith("é 1")
    assert "\ufffd\ufffd" not in text

    prompts = [{"prompt": "one, two, three, four, five, six, seven, eight", "id": 7}, {"prompt": "é 1", "seed": 3}]
    (workdir / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
    out = workdir / "out.jsonl"
    result = run(
        2, *flags, f"--prompts={workdir / 'prompts.jsonl'}", f"--out={out}", "--mesh.fsdp=1", "--mesh.tensor=2"
    )
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["prompt"] == prompts[0]["prompt"]
    assert first["id"] == 7
    assert (first["seed"], second["seed"]) == (np.random.SeedSequence([3, 0]).generate_state(1)[0], 3)
    assert printable(second["prompt"] + second["completion"]) == text[:-1]  # Only printed text is escaped.
    assert first["ended_by"] in ("limit", "stop string", "end of text")
    assert 0 < first["new_tokens"] <= 20


def test_a_prompt_must_fit_the_context(workdir):
    with pytest.raises(UserError, match=r"--prompt has 200 tokens, and the model.s context data\.sequence_length=128"):
        main([f"--workdir={workdir}", f"--prompt={'long ' * 40}", "--mesh.fsdp=1", "--mesh.data=8"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "the file has no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"prompt": "a"}\n\n{"promt": "b"}', "line 3 has no field 'prompt'. Did you mean 'promt'"),
        ('{"prompt": ""}', "line 1: prompt='' must be text"),
        ('{"prompt": 3}', "line 1: prompt=3 must be text"),
        ('{"prompt": "a", "seed": -1}', "line 1: seed=-1 must lie in"),
        ('{"prompt": "a", "messages": []}', "line 1 has both prompt and messages"),
    ],
)
def test_mistakes_in_a_file_of_prompts_name_its_line(tmp_path, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=message) as error:
        main([f"--workdir={tmp_path}", f"--prompts={path}"])
    assert str(path) in str(error.value)


def test_prompts_of_a_file_have_hashes_of_seed_and_index(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c", "seed": 9}\n')
    found = []
    for seed in (2**32 - 1, 0, 1, 2):
        options = argparse.Namespace(prompt=None, prompts=tmp_path / "prompts.jsonl", seed=seed)
        *hashed, given = (seed for _, seed in _read_prompts(options))
        assert hashed == [np.random.SeedSequence([seed, i]).generate_state(1)[0] for i in range(2)]
        assert given == 9
        found += hashed
    assert len(set(found)) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --prompt=TEXT or --prompts=FILE"),
        (["--prompt=a", "--prompts=b"], "one of them"),
        (["--prompt="], "--prompt='' is empty"),
        (["--prompts=no/such.jsonl"], "--prompts=no/such.jsonl: cannot be read"),
        (["--prompt=a", "--out=b"], "--out=b requires --prompts"),
        (["--prompt=a", "--seed=-1"], "--seed=-1"),
        (["--prompt=a", "--new_tokens=0"], "--new_tokens=0 must be positive"),
        (["--prompt=a", "--stop="], "--stop=''"),
        (["--prompt=a", "--top_p=2"], "top_p=2.0 must be"),
        (["--prompt=a", "--mash.fsdp=2"], r"Did you mean --mesh\.fsdp\?"),
        (["--prompt=a"], "no config.json there"),
    ],
)
def test_mistakes_in_flags_are_named(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        main([f"--workdir={tmp_path}", *flags])
