"""A fixture with the vocabularies of tiktoken."""

import os
import shutil

import pytest
from conftest import ROOT

VOCABULARIES = ROOT.parent / "shared" / "tiktoken"


@pytest.fixture
def tiktoken_cache(tmp_path, monkeypatch):
    """Give tiktoken a cache that holds its vocabularies, so that it downloads nothing. Skip the test without them."""
    if not VOCABULARIES.is_dir():
        pytest.skip("needs the vocabularies of ../shared/tiktoken")
    shutil.copytree(VOCABULARIES, tmp_path / "cache", copy_function=shutil.copyfile)
    os.chmod(tmp_path / "cache", 0o755)  # The original may be read-only, and tiktoken writes to its cache.
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
