"""An imported model is a run that generates but cannot be resumed. tests/tutorials_test.py trains one."""

import pytest
from conftest import TINY
from helpers.command_server import commands
from helpers.interop_folders import FIXTURES, import_


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    result = commands().run(["difftx", "convert", "--from=hf", "--to=difftx", f"--input={tmp_path}", "--out=x"])
    error = "error: --to=difftx requires --config=FILE.py, the config of the new run (docs/config.md)\n"
    assert (result.returncode, result.stderr) == (2, error)


@pytest.mark.long
def test_an_imported_run_generates_but_cannot_be_resumed(text_file, tmp_path):
    base = {name: value for name, value in TINY.items() if not name.startswith("model.")} | {"data.path": text_file}
    fields = [f"--config.{name}={value}" for name, value in base.items()]
    workdir = import_(FIXTURES / "diff", tmp_path / "run", *fields)
    generate = ["difftx", "generate", f"--workdir={workdir}", "--prompt=line", "--new_tokens=5"]
    assert commands().run(generate).stdout.startswith("line")
    recipe = [f"--config=configs/differentialize.py:{workdir}", "--config.checkpoint.init_from=none"]
    result = commands().run(["train.py", *recipe, *fields, f"--workdir={workdir}"])
    assert result.returncode == 2
    assert "has weights alone, from difftx convert; use a new --workdir with --config.checkpoint.init" in result.stderr
