"""Fixtures with the checkpoints of a run on a disk and in buckets."""

import pytest
from conftest import replace
from helpers.training_checkpoints import LOADER, state_at

from difftx.training.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def trainer(folder, config):
    """Return a function that opens the checkpoints of one run, as a restarted training does."""

    def opened(**options):
        settings = replace(config(), "checkpoint", keep=2, every_steps=10).checkpoint
        return Checkpointer(folder, settings, save_seconds=60, **options)

    return opened


@pytest.fixture
def save(config):
    def saved(checkpointer, *steps, size=3):
        for step in steps:
            checkpointer.save(state_at(step, size), LOADER, config())
            checkpointer.wait()

    return saved
