import pytest
from conftest import replace
from helpers.training_checkpoints import LOADER, state_at

from difftx.training.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def saved(config, tmp_path):
    """Return a function that saves tiny states of some steps, and returns their folder."""

    def save(*steps, **changes):
        checkpoint = replace(config(), "checkpoint", **changes)
        writer = Checkpointer(tmp_path, checkpoint.checkpoint)
        for step in steps:
            writer.save(state_at(step), LOADER, checkpoint)
        writer.close()
        return tmp_path / "checkpoints"

    return save


@pytest.fixture
def trainer(config, tmp_path):
    """Return a checkpointer as a training that starts again opens it."""
    return Checkpointer(tmp_path, config().checkpoint)
