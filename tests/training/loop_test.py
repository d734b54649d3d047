"""The training loop when an evaluation fails."""

import pytest

from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.training import loop
from difftx.training.run import Run


def test_a_failed_evaluation_loses_no_steps(config, mesh_of, text_file, tmp_path, capsys):
    """Without a checkpoint, each restart would fail at the evaluation of step 3. With it, the run continues."""
    c = config(
        data__path=text_file,
        train__steps=5,
        optimizer__schedule="constant",  # So that the program is that of guards_test.py, and compiled once.
        checkpoint__every_steps=100,
        eval__every_steps=3,
        eval__suites="",
        logging__trackers="",
    )

    def train(evaluate):
        tokenizer = load_tokenizer(c.data.tokenizer)
        return loop.train(Run(c, tmp_path, mesh_of(), tokenizer, load_sources(c.data, tokenizer)), evaluate)

    def fails(*_):
        raise ZeroDivisionError("of the suite")

    with pytest.raises(ZeroDivisionError, match="of the suite"):
        train(fails)
    assert "step 3: the evaluation failed; its checkpoint is saved" in capsys.readouterr().out
    assert (tmp_path / "checkpoints" / "3").is_dir()
    assert train(lambda *_: {}) == 0
    assert "from step 3 to 5" in capsys.readouterr().out
