"""The persistent compilation cache: training twice in real processes, and the choice of the folder."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, child_environment, write_text

from difftx import compilation_cache
from difftx.errors import UserError


def train(folder, name, *, cache_home, **fields):
    """Train a run in `folder`, and return its losses."""
    # Little more than the step is compiled.
    flags = TINY | {"model.num_layers": "1", "eval.suites": "", "logging.trackers": ""}
    flags |= {"data.path": write_text(folder / "text.txt"), "train.compilation_cache": "auto"} | fields
    variables = {"XDG_CACHE_HOME": str(cache_home), "JAX_LOG_COMPILES": "1"}
    environment = {k: v for k, v in child_environment(1).items() if "CACHE" not in k} | variables
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={folder / name}"]
    command += [f"--config.{field}={value}" for field, value in flags.items()]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    # The loop compiles the step in advance, for its final shapes and shardings.
    assert result.stderr.count("Compiling jit(step)") == 1
    return losses


def entries(folder):
    return {path.relative_to(folder) for path in folder.rglob("*-cache")}


@pytest.mark.long
def test_a_second_training_compiles_nothing_new(tmp_path):
    home = tmp_path / "home"
    losses = train(tmp_path, "first", cache_home=home)
    compiled = entries(home)
    assert any("step" in path.name for path in compiled)
    assert all(path.parts[0] == "difftx" for path in compiled)
    assert train(tmp_path, "second", cache_home=home) == losses
    assert entries(home) == compiled
    assert len(losses) == 6
    assert train(tmp_path, "other_seed", cache_home=home, **{"train.seed": 1, "data.seed": 1}) != losses
    assert entries(home) == compiled


@pytest.fixture
def variables(monkeypatch):
    """An environment without settings of the cache, and a process that has not imported JAX."""
    monkeypatch.setattr(os, "environ", {name: text for name, text in os.environ.items() if "CACHE" not in name})
    monkeypatch.delitem(sys.modules, "jax")
    return monkeypatch


def test_variables_of_jax_take_precedence_only_over_auto(tmp_path, variables):
    variables.setenv("JAX_COMPILATION_CACHE_DIR", "chosen")
    variables.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.enable()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "chosen"
    compilation_cache.enable(str(tmp_path / "named"))
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "named")
    compilation_cache.enable("off")
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "False"


def test_a_folder_that_cannot_be_made_is_refused_only_if_the_user_names_it(tmp_path, variables):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"train\.compilation_cache=.*: no folder to write to"):
        compilation_cache.enable(str(tmp_path / "file" / "cache"))
    variables.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation_cache.enable()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_machines_with_other_cpu_features_use_another_folder(tmp_path):
    names = []
    for flags in ("fpu sse avx2", "fpu sse avx2 avx512f", "fpu sse avx2"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        names.append(compilation_cache._cpu_features(tmp_path / "cpuinfo"))
    assert names[0] == names[2] != names[1]
