"""The commands of docs/tokenizers.md, in a folder outside the repository."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment, write_text

pytest.importorskip("tokenizers", reason="make test-long installs the extra tokenizers")

PAGE = (ROOT / "docs" / "tokenizers.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SHORT = TINY | {"eval.loss_tokens": "256", "eval.sample_tokens": "4", "logging.tensorboard": "false"}
SHORT |= {"data.sequence_length": "64", "train.global_batch_tokens": "512"}


def run(place, line, typed=""):
    """Execute a command of the page with tiny sizes; return what it printed."""
    python, *words = shlex.split(line)
    assert python == "python"
    if words[0] == "train.py":
        fields = {name: value for name, value in SHORT.items() if f"--config.{name}=" not in line}
        words = [str(ROOT / "train.py"), *words[1:], *(f"--config.{name}={value}" for name, value in fields.items())]
    environment = child_environment(1) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, env=environment, cwd=place, input=typed, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.mark.long
def test_the_page_works_from_text_to_chat(tmp_path):
    assert len(COMMANDS) == 7
    train_tokenizer, prepare, train, prepare_chats, train_chats, chat, generate = COMMANDS
    write_text(tmp_path / "text.txt")
    (template,) = re.findall(r"```jinja\n(.*?)\n```", PAGE, re.DOTALL)
    (example,) = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    assert re.search(r"tokenizer: \d+ tokens.*; trained on 1 documents", run(tmp_path, train_tokenizer))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    (tmp_path / "chats.jsonl").write_text("\n".join([example.replace("2", str(i)) for i in range(200)]))
    for line in (prepare, train, prepare_chats, train_chats):
        run(tmp_path, line)
    size = json.loads((tmp_path / "runs" / "chat" / "config.json").read_text())["model"]["vocab_size"]
    assert size % 128 == 0
    said = run(tmp_path, chat, "2+3\n/temperature 0\n/tokens 5\n2+3\n/bad\n").splitlines()
    assert said[0] == "A conversation; /help lists the commands"
    assert said[-1].startswith("error: /bad: no such command")
    assert run(tmp_path, generate).startswith("The ")
