"""The command `python -m difftx generate`, as a user calls it."""

import json

import numpy as np
import pytest
from conftest import child_environment
from helpers.command_server import commands
from helpers.inference_models import language_model
from helpers.interop_folders import run_of

from difftx.commands.generate import main
from difftx.errors import UserError, printable


def run(devices, *flags):
    return commands().run(["difftx", "generate", *flags], environment=child_environment(devices))


@pytest.mark.long
def test_a_prompt_and_a_file_of_prompts_on_other_meshes(config, mesh_of, tmp_path):
    workdir = run_of(language_model(config, mesh_of()), tmp_path)
    sampling = ["--temperature=1", "--top_p=0.9", "--seed=3"]
    flags = [f"--workdir={workdir}", "--new_tokens=20", "--stop=\ufffd\ufffd", *sampling]
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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\n\n{"promt": "b"}', "line 3 has no field 'prompt'. Did you mean 'promt'"),
        ('{"prompt": ""}', "line 1: prompt='' must be text"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --prompt=TEXT or --prompts=FILE"),
        (["--prompt=a", "--prompts=b"], "one of them"),
        (["--prompts=no/such.jsonl"], "--prompts=no/such.jsonl: cannot be read"),
        (["--prompt=a", "--out=b"], "--out=b requires --prompts"),
        (["--prompt=a", "--new_tokens=0"], "--new_tokens=0 must be positive"),
        (["--prompt=a", "--top_p=2"], "top_p=2.0 must be"),
        (["--prompt=a", "--mash.fsdp=2"], r"Did you mean --mesh\.fsdp\?"),
        (["--prompt=a"], "no config.json there"),
    ],
)
def test_mistakes_in_flags_are_named(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        main([f"--workdir={tmp_path}", *flags])
