"""Run directories from other people: without confirmation, eval.py sends and executes nothing that they name."""

import contextlib
import importlib
import json
import sys

import pytest
from conftest import ROOT, TINY
from helpers.chat_server import KEY, ChatServer, completion
from helpers.evals_examples import long_bench, set_of, write_lines
from helpers.report_runs import save_run

from difftx.commands.evaluate import confirm_outward
from difftx.commands.flags import config_of
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.errors import UserError

JUDGE = {"hallucination.judge_model": "gpt-4o", "judge.base_url": "http://foreign/v1"}
JUDGE |= {"judge.key_variable": "OTHER_KEY"}
URL = r"eval.judge.base_url='http://foreign/v1' in FILE would .*; to allow it, add --eval.judge.base_url=http://foreign/v1"
DEFAULT = {"hallucination.judge_model": "gpt-4o"}


@pytest.mark.parametrize(
    ("fields", "suite", "flags", "message"),
    [
        (JUDGE, "hallucination", [], f"{URL}, or --trust_run_config for all such fields"),
        (JUDGE | {"quantize.suites": "hallucination"}, "quantize", [], URL),
        (JUDGE, "hallucination", ["hallucination.judge_model", "judge.key_variable"], URL),
        (JUDGE, "hallucination", ["judge.base_url"], "eval.judge.key_variable='OTHER_KEY' in FILE would send"),
        (JUDGE, "hallucination", ["judge.base_url", "judge.key_variable"], None),
        (JUDGE, "loss", [], None),
        (DEFAULT, "hallucination", [], "eval.judge.base_url='https://api.openai.com/v1'"),
        (DEFAULT, "hallucination", ["hallucination.judge_model"], None),
        ({}, "harness", [], None),
        ({"harness.include_path": "tasks"}, "harness", [], "include_path='tasks' in FILE would execute code of that"),
        ({"harness.tasks": "piqa,humaneval"}, "harness", [], "tasks='piqa,humaneval' in FILE would download"),
    ],
)
def test_values_of_a_foreign_config_need_confirmation(fields, suite, flags, message, capsys):
    config = load_config("quickstart:diff", {f"eval.{name}": value for name, value in fields.items()})
    overrides = {f"eval.{name}": fields[name] for name in flags}
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        confirm_outward(config, "FILE", [suite], overrides, trusted=False)
    confirm_outward(config, "FILE", [suite], overrides, trusted=True)
    assert bool(capsys.readouterr().out) == (message is not None)


def test_a_config_in_json_may_come_from_another_person(tmp_path):
    path = tmp_path / "config.json"
    changes = {"eval.suites": "loss,harness", "eval.harness.include_path": "tasks"}
    path.write_text(load_config("quickstart", changes).to_json())
    with pytest.raises(
        UserError, match=rf"'tasks' in {path} would execute .* add --eval\.harness\.include_path=tasks$"
    ):
        config_of(str(path), {})
    assert config_of(str(path), {"eval.harness.include_path": "tasks"}).eval.harness.include_path == "tasks"
    assert config_of(str(path), {"eval.suites": "loss"}).eval.harness.include_path == "tasks"


@pytest.mark.long
def test_endpoint_from_the_command_line_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    write_lines(tmp_path / "qa.jsonl.gz", long_bench(3, words=4))
    changes = {"data.path": f"{tmp_path}/text.txt", "data.sequence_length": "256", "train.global_batch_tokens": "2048"}
    changes |= {"eval.hallucination.sets": json.dumps([set_of(tmp_path, new_tokens=2)]), "mesh.fsdp": "8"}
    saved = save_run(load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | changes), tmp_path / "run", (3,))

    def evaluate(*flags):
        (saved.workdir / "evals" / "hallucination" / "verdicts.jsonl").unlink(missing_ok=True)
        monkeypatch.setattr(
            sys, "argv", ["eval.py", f"--workdir={saved.workdir}", "--suite=hallucination", "--again", *flags]
        )
        return importlib.import_module("eval").main()

    accurate = {"reply": completion('{"why": "", "accurate": true}')}
    with ChatServer(lambda *_: accurate) as foreign, ChatServer(lambda *_: accurate) as own:
        fields = {"eval.hallucination.judge_model": "gpt-4o", "eval.judge.base_url": foreign.url}
        (saved.workdir / "config.json").write_text(override(saved.config, fields).to_json())
        with pytest.raises(UserError, match=r"eval\.judge\.base_url"):
            evaluate()
        assert evaluate(f"--eval.judge.base_url={own.url}") == 0
        assert not foreign.asked
        assert own.asked
        assert "--trust_run_config" not in capsys.readouterr().out
        assert evaluate("--trust_run_config") == 0
        assert len(foreign.asked) == len(own.asked)
        assert f"--trust_run_config: eval.judge.base_url='{foreign.url}' in " in capsys.readouterr().out
