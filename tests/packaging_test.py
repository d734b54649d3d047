"""The wheel of difftx. Building it requires setuptools, which comes with the extra "eval" of `make test-long`."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

pytestmark = pytest.mark.long

PRINT_CONFIG = """
import difftx
from difftx.config.recipes import load_config
print(difftx.__file__)
print(load_config("quickstart:diff", {}).to_json(), end="")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Build the wheel of a copy of the source tree, where the build may write, and unpack it."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools is not installed")
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "unpacked"))
    for name in ("difftx", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "requirements.txt", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(command, cwd=source, check=True, timeout=300)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def config_printed_with(path, cwd):
    """Return `difftx.__file__` and the config of a recipe in a process that imports difftx from `path`."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-c", PRINT_CONFIG]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\n", maxsplit=1)


def test_the_wheel_has_all_files_of_the_package_and_nothing_else(unpacked):
    def files(root, folder):
        found = (root / folder).rglob("*")
        return {str(path.relative_to(root)) for path in found if path.is_file() and path.suffix != ".pyc"}

    expected = files(ROOT, "difftx") | {f"difftx/{path}" for path in files(ROOT, "configs")}
    assert files(unpacked, "difftx") == expected
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"difftx"}


def test_recipes_are_the_same_from_the_wheel_and_from_the_source_tree(unpacked, tmp_path):
    installed, config = config_printed_with(unpacked, tmp_path)
    cloned, expected = config_printed_with(ROOT, tmp_path)
    assert installed == str(unpacked / "difftx" / "__init__.py")
    assert cloned == str(ROOT / "difftx" / "__init__.py")
    assert config == expected
