"""A fixture that starts several training processes."""

import pytest
from helpers.processes import Processes


@pytest.fixture
def started(text_file, tmp_path):
    """Return a function that starts processes, which do not outlive the test."""
    groups = []

    def start(workdir="run", **options):
        groups.append(Processes(text_file, tmp_path / workdir, tmp_path, **options))
        return groups[-1]

    yield start
    for group in groups:
        group.kill()
