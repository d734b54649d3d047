"""The wheel of difftx. Building it requires hatchling, which is in the extra "test"."""

import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, TINY, child_environment
from packaging.requirements import Requirement

import difftx

pytestmark = pytest.mark.long


def build(source):
    """Build the wheel of a copy of the source tree, where the build may write, in a new folder."""
    for name in ("difftx", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(command, cwd=source, check=True, timeout=300)
    (wheel,) = source.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("source"))


def test_a_second_build_has_the_same_bytes(wheel, tmp_path):
    assert build(tmp_path).read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel in a new virtual environment, and link the packages there that it requires without extras."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(name="difftx", path=[str(site)])
    required, todo = set(), [(own, "")]
    while todo:
        distribution, extra = todo.pop()
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pairs = {(requirement.name, extra) for extra in ("", *requirement.extras)} - required
                todo += [(importlib.metadata.distribution(name), extra) for name, extra in pairs]
                required |= pairs
    for name in {name for name, _ in required}:
        for file in importlib.metadata.distribution(name).files:
            if ".." not in file.parts:  # Skips scripts in bin/.
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                if not (site / file).exists():
                    (site / file).symlink_to(file.locate())
    return folder


def test_the_wheel_has_all_files_of_the_package_and_nothing_else(unpacked):
    def files(root, folder):
        found = (root / folder).rglob("*")
        return {str(p.relative_to(root)): p.read_bytes() for p in found if p.is_file() and p.suffix != ".pyc"}

    recipes = {f"difftx/{path}": content for path, content in files(ROOT, "configs").items()}
    assert files(unpacked, "difftx") == files(ROOT, "difftx") | recipes
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"difftx"}


def test_the_metadata_names_the_licence_and_the_version(unpacked):
    (folder,) = unpacked.glob("difftx-*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Version"] == difftx.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_wheel_is_all_that_a_user_needs(installed, tmp_path):
    """Outside of the source tree, train, evaluate, report, plan, sweep, and run the first example of docs/layer.md."""
    environment = {name: value for name, value in child_environment(1).items() if name != "PYTHONPATH"}

    def run(program, *arguments, code=0):
        command = [installed / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    (package,) = installed.glob("lib/python*/site-packages/difftx")
    assert run("python", "-c", "import difftx; print(*difftx.__path__)") == f"{package}\n"
    run("python", "-c", "import pytest", code=1)  # Packages that the wheel does not require are absent.
    assert run("difftx", "--version") == f"difftx {difftx.__version__}\n"
    fields = TINY | {"eval.loss_tokens": "512", "eval.sample_tokens": "8"}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    run("difftx", "train", "--config=quickstart:diff", "--workdir=runs/diff", *flags)
    grid = ["--grid", "architecture=transformer", "seed=1", "--out=runs"]
    assert "done" in run("difftx", "sweep", "--config=quickstart", *grid, *flags)
    (transformer,) = (folder.name for folder in (tmp_path / "runs").glob("*transformer*") if folder.is_dir())
    for name in ("diff", transformer):
        assert "loss" in run("difftx", "eval", f"--workdir=runs/{name}", "--suite=loss,sample")
    headline, *_, path = run("difftx", "report", f"--workdir=runs/diff,runs/{transformer}").splitlines()
    assert (path, "validation loss" in headline) == ("runs/diff/report.html", True)
    assert "λ of each layer: diff" in (tmp_path / "runs" / "diff" / "report.html").read_text()
    assert "curves.png" in run("difftx", "eval", "--curves=runs/*", "--out=figures")
    assert "memory" in run("difftx", "plan", "--config=quickstart:diff", "--topology=cpu:8").lower()
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "layer.md").read_text(), re.DOTALL)[1]
    assert run("python", "-c", f"{example}\nprint(apply(layer, x).shape)") == "(2, 32, 64)\n"
