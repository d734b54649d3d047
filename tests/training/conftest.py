"""Fixtures with saved checkpoints of tiny states."""

import shutil

import pytest
from conftest import ROOT, TINY, replace
from helpers.training_checkpoints import LOADER, state_at

from difftx.config.recipes import load_config
from difftx.training.checkpoint.checkpointer import Checkpointer


def save(config, workdir, *steps):
    """Save tiny states of some steps, and return their folder."""
    writer = Checkpointer(workdir, config.checkpoint)
    for step in steps:
        writer.save(state_at(step), LOADER, config)
    writer.close()
    return workdir / "checkpoints"


@pytest.fixture
def saved(config, tmp_path):
    """Return a function that saves tiny states of some steps, and returns their folder."""
    return lambda *steps, **changes: save(replace(config(), "checkpoint", **changes), tmp_path, *steps)


@pytest.fixture(scope="session")
def original_20_and_40(tmp_path_factory):
    return save(load_config(f"{ROOT}/configs/quickstart.py:diff", TINY), tmp_path_factory.mktemp("original"), 20, 40)


@pytest.fixture
def saved_20_and_40(original_20_and_40, tmp_path):
    """Return the folder of a copy of tiny states of steps 20 and 40."""
    return shutil.copytree(original_20_and_40, tmp_path / "checkpoints")


@pytest.fixture
def trainer(config, tmp_path):
    """Return a checkpointer opened for training, as after a restart."""
    return Checkpointer(tmp_path, config().checkpoint)
