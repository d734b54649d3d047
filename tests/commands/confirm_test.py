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

STEP = 3
ACCURATE = {"reply": completion('{"why": "", "accurate": true}')}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    write_lines(folder / "qa.jsonl.gz", long_bench(3, words=4))
    changes = {"data.path": f"{folder}/text.txt", "data.sequence_length": "256", "train.global_batch_tokens": "2048"}
    changes |= {"eval.hallucination.sets": json.dumps([set_of(folder, new_tokens=2)]), "mesh.fsdp": "8"}
    return save_run(load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | changes), folder / "run", (STEP,))


@pytest.fixture
def evaluate(saved, monkeypatch):
    """Return a function that sets fields of the run's config.json, runs eval.py and returns its exit code."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("DATABASE_PASSWORD_KEY", "hunter2-hunter2")

    def evaluate(fields, suite, *flags):
        config = override(saved.config, {f"eval.{name}": str(value) for name, value in fields.items()})
        (saved.workdir / "config.json").write_text(config.to_json())
        verdicts = saved.workdir / "evals" / "hallucination" / "verdicts.jsonl"
        verdicts.unlink(missing_ok=True)
        arguments = ["eval.py", f"--workdir={saved.workdir}", f"--suite={suite}", "--again", *flags]
        monkeypatch.setattr(sys, "argv", arguments)
        return importlib.import_module("eval").main()

    return evaluate


@pytest.mark.parametrize("suite", ["hallucination", "quantize"])
@pytest.mark.parametrize("flags", [[], ["--eval.hallucination.judge_model=gpt-5"], ["--eval.judge.key_variable=none"]])
def test_nothing_is_sent_to_a_foreign_endpoint(evaluate, suite, flags):
    with ChatServer(lambda *_: ACCURATE) as foreign:
        fields = {"hallucination.judge_model": "gpt-4o", "judge.base_url": foreign.url}
        fields |= {"quantize.suites": "hallucination"}
        with pytest.raises(UserError) as error:
            evaluate(fields, suite, *flags)
        assert not foreign.asked
    text = str(error.value)
    assert f"eval.judge.base_url='{foreign.url}'" in text
    assert f"add --eval.judge.base_url={foreign.url}, or --trust_run_config" in text


def test_default_endpoint_requires_a_judge_model_from_the_command_line(evaluate):
    with pytest.raises(UserError, match=r"eval.judge.base_url='https://api.openai.com/v1'"):
        evaluate({"hallucination.judge_model": "gpt-4o"}, "hallucination")


def test_a_foreign_key_variable_is_not_sent(evaluate):
    with ChatServer(lambda *_: ACCURATE, key="hunter2-hunter2") as server:
        fields = {"hallucination.judge_model": "gpt-4o", "judge.key_variable": "DATABASE_PASSWORD_KEY"}
        with pytest.raises(UserError, match=r"eval.judge.key_variable='DATABASE_PASSWORD_KEY' in .*/config.json would"):
            evaluate(fields, "hallucination", f"--eval.judge.base_url={server.url}")
        assert not server.asked


def test_only_values_from_the_config_of_a_run_need_confirmation(saved, capsys):
    fields = {"eval.hallucination.judge_model": "gpt-4o", "eval.judge.base_url": "http://localhost:1/v1"}
    fields |= {"eval.judge.key_variable": "OTHER_KEY"}
    config = override(saved.config, fields)
    flags = {name: fields[name] for name in ("eval.judge.base_url", "eval.judge.key_variable")}
    confirm_outward(config, str(saved.workdir), ["hallucination"], flags, trusted=False)
    confirm_outward(config, str(saved.workdir), ["loss"], {}, trusted=False)
    asked = override(saved.config, {"eval.hallucination.judge_model": "gpt-4o"})
    flags = {"eval.hallucination.judge_model": "gpt-4o"}
    confirm_outward(asked, str(saved.workdir), ["hallucination"], flags, trusted=False)
    confirm_outward(saved.config, str(saved.workdir), ["hallucination", "harness"], {}, trusted=False)
    assert capsys.readouterr().out == ""
    confirm_outward(config, str(saved.workdir), ["hallucination"], {}, trusted=True)
    printed = capsys.readouterr().out
    assert "eval.judge.base_url='http://localhost:1/v1'" in printed
    assert "eval.judge.key_variable='OTHER_KEY'" in printed


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
def test_endpoint_from_the_command_line_is_used(evaluate, capsys):
    with ChatServer(lambda *_: ACCURATE) as foreign, ChatServer(lambda *_: ACCURATE) as own:
        fields = {"hallucination.judge_model": "gpt-4o", "judge.base_url": foreign.url}
        assert evaluate(fields, "hallucination", f"--eval.judge.base_url={own.url}") == 0
        assert not foreign.asked
        assert own.asked
        assert "--trust_run_config" not in capsys.readouterr().out
        assert evaluate(fields, "hallucination", "--trust_run_config") == 0
        # Now the foreign server got all questions, as many as the own server in the first evaluation.
        assert len(foreign.asked) == len(own.asked)
        printed = capsys.readouterr().out
        assert f"--trust_run_config: eval.judge.base_url='{foreign.url}' in " in printed
        # Other suites and the offline judge need no confirmation.
        assert evaluate(fields, "loss") == 0
        assert evaluate({"judge.base_url": foreign.url}, "hallucination") == 0
        assert len(foreign.asked) == len(own.asked)  # Still equal: the foreign server got no further question.


@pytest.fixture
def hostile_tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef run(doc):\n    return 'a'\n")
    (folder / "evil.yaml").write_text("task: evil\ndoc_to_text: !function evil.run\n")
    return folder


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"include_path": True}, "eval.harness.include_path='.*/tasks' in .* would execute code of that folder"),
        ({"include_path": True, "tasks": "evil"}, "eval.harness.include_path="),
        ({"tasks": "piqa,humaneval"}, "eval.harness.tasks='piqa,humaneval' in .* would download"),
    ],
)
def test_code_of_a_foreign_folder_is_not_executed(evaluate, hostile_tasks, tmp_path, monkeypatch, fields, named):
    monkeypatch.setattr("difftx.evals.require_extra", lambda *_: None)  # As if lm_eval were installed.
    fields = {f"harness.{name}": hostile_tasks if value is True else value for name, value in fields.items()}
    with pytest.raises(UserError, match=named):
        evaluate(fields, "harness")
    assert not (tmp_path / "executed").exists()


@pytest.mark.long
def test_trusted_folder_executes_code(evaluate, hostile_tasks, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    fields = {"harness.include_path": hostile_tasks, "harness.tasks": "evil"}
    with contextlib.suppress(Exception):  # The task is incomplete.
        evaluate(fields, "harness", "--trust_run_config")
    assert (tmp_path / "executed").exists()
