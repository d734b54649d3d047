"""The study of converted Transformers, with a saved run in place of the training."""

import shutil

import pytest
from conftest import write_text
from helpers.report_runs import save_run

from difftx.commands.convert import main as convert
from difftx.errors import UserError
from difftx.json_files import read_json
from studies import differential_study

TASK, SEED = "recall", 3


def test_a_start_of_an_earlier_training_is_refused(config, tmp_path, monkeypatch):
    """The study continues with its converted folders, unless their Transformer was trained again since."""
    transformer = differential_study.start_of(tmp_path, TASK, "transformer", SEED)
    start = differential_study.start_of(tmp_path, TASK, "zero-branch", SEED)
    fields = {"data__path": write_text(tmp_path / "text.txt"), "model__num_heads": 4, "model__head_norm": "none"}
    fields |= {"mesh__fsdp": 8}

    def train():
        save_run(config("transformer", **fields), transformer, [2])

    monkeypatch.setattr(differential_study, "ARMS", ("transformer", "zero-branch"))
    monkeypatch.setattr(differential_study, "sweep", lambda *_: None)
    monkeypatch.setattr(differential_study, "run_difftx", lambda to, words: to.exists() or convert(words[1:]))
    train()
    for _ in range(2):
        differential_study.train_transformer(tmp_path, TASK, SEED)
    weights = read_json(transformer / "checkpoints" / "2" / "manifest.json")["weights"]
    assert read_json(start / "manifest.json")["source_weights"] == weights
    shutil.rmtree(transformer)
    train()
    with pytest.raises(UserError) as error:
        differential_study.train_transformer(tmp_path, TASK, SEED)
    assert str(error.value) == (
        f"{start} was converted from other weights than those of {transformer}, which was trained again; remove "
        f"{start} and the runs that started from it"
    )
    shutil.rmtree(start)
    differential_study.train_transformer(tmp_path, TASK, SEED)
