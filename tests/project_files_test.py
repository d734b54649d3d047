"""Files of the project that must agree with each other, most of them with pyproject.toml."""

import re
import subprocess
import tomllib

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import difftx

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_CI = (
    None,
    "test",
    "lint",
    "eval",
    "tokenizers",
    "browser",
    "docs",
    "gcs",
    "s3",
    "buckets-test",
)  # See the Makefile.


def requirements(name):
    """Return the lines of a requirements file, without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_requirements_are_the_dependencies_and_those_of_the_tests():
    assert requirements("requirements.txt") == PROJECT["dependencies"] + EXTRAS["test"]


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_constraints_satisfy_the_declared_ranges(extra):
    pinned = dict(re.fullmatch(r"(\S+)==(\S+)", line).groups() for line in requirements("constraints.txt"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    declared = [Requirement(text) for text in (PROJECT["dependencies"] if extra is None else EXTRAS[extra])]
    for requirement in declared:
        name = canonicalize_name(requirement.name)
        if extra in OF_CI:
            assert name in pinned
        if name in pinned:
            assert requirement.specifier.contains(pinned[name]), f"{requirement} and {name}=={pinned[name]}"


def test_dockerignore_allows_exactly_the_files_that_images_copy():
    patterns = requirements(".dockerignore")
    assert patterns[0] == "*"
    for name in ("tpu", "cuda"):
        text = (ROOT / "difftx" / "launch" / "templates" / f"{name}.Dockerfile").read_text()
        copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
        assert copied == {pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")}


def test_no_file_installs_difftx_from_an_index():
    from_index = re.compile(r"pip3? install[^\n`]*[ '\"]difftx\b(?!:)")
    assert from_index.search("pip install 'difftx[tpu]'")
    assert from_index.search("pip install -U difftx")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    names = names or [str(path.relative_to(ROOT)) for path in ROOT.glob("*.md")]  # An archive has no git repository.
    paths = [ROOT / name for name in names if name != "tests/project_files_test.py"]
    texts = {path: path.read_text(errors="ignore") for path in paths if path.is_file()}
    assert [path for path, text in texts.items() if from_index.search(text)] == []


@pytest.mark.parametrize("folder", ["benchmarks", "studies"])
def test_the_readme_of_a_folder_of_scripts_lists_each_once(folder):
    rows = re.findall(r"^\| `(\S+)` \|", (ROOT / folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(p.name for p in (ROOT / folder).glob("[!_]*.*") if p.suffix in (".py", ".sh"))


def test_the_citation_and_the_change_log_have_the_version():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == difftx.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == difftx.__version__
