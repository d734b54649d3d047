"""A fixture with the vocabularies of tiktoken."""

import os
import shutil

import pytest
from conftest import ROOT

VOCABULARIES = ROOT.parent / "shared" / "tiktoken"


@pytest.fixture(scope="module")
def tiktoken_cache(tmp_path_factory):
    """Give tiktoken a cache that holds its vocabularies, so that it downloads nothing. Skip the test without them."""
    if not VOCABULARIES.is_dir():
        pytest.skip("needs the vocabularies of ../shared/tiktoken")
    cache = tmp_path_factory.mktemp("tiktoken") / "cache"
    shutil.copytree(VOCABULARIES, cache, copy_function=shutil.copyfile)
    os.chmod(cache, 0o755)  # The original may be read-only, and tiktoken writes to its cache.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield
