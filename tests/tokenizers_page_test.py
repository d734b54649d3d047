"""The commands of docs/tokenizers.md, in a folder outside the repository."""

import json
import re

import pytest
from conftest import TINY, write_text
from helpers.pages import blocks, page_commands, run_command

pytest.importorskip("tokenizers", reason="make test-long installs the extra tokenizers")

COMMANDS = [line for lines in page_commands("tokenizers.md") for line in lines]
SHORT = TINY | {"eval.loss_tokens": "256", "eval.sample_tokens": "4", "logging.trackers": ""}
SHORT |= {"data.sequence_length": "64", "train.global_batch_tokens": "512"}


def run(page_folder, line, typed=None):
    """Execute a command of the page with tiny sizes, and return its output."""
    return run_command(page_folder, line, fields=SHORT if line.startswith("difftx train") else {}, typed=typed)


@pytest.mark.long
def test_the_page_works_from_text_to_chat(tmp_path):
    assert len(COMMANDS) == 7
    train_tokenizer, prepare, train, prepare_chats, train_chats, chat, generate = COMMANDS
    write_text(tmp_path / "text.txt")
    (template,) = (block.removesuffix("\n") for block in blocks("tokenizers.md", "jinja"))
    (example,) = (block.removesuffix("\n") for block in blocks("tokenizers.md", "json"))
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
