"""Exported folders in vLLM and in SGLang's norms, on the CPU. Run with `make engines`."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from helpers.inference_models import prompts_of
from helpers.interop_folders import export
from helpers.interop_models import CLASSES, SERVABLE, exported

import difftx
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY

PYTHON = os.environ.get("ENGINES_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make engines installs the engines, and runs these tests with them")

PROMPTS = prompts_of(range(3, 23))
NEW_TOKENS = 24
SERVED = (*SERVABLE, *CLASSES)
END_OF_TEXT = 256  # All tokens of text are smaller.
BFLOAT16 = ("diff", "zero_branch", "dex")  # Models with λ vectors or λ.
FLAGS = ("--dtype=float32", "--max-model-len=256", "--enforce-eager")  # Compilation takes a minute.
SHARDED = {
    # vLLM 0.32 fails on CPUs with two pipeline stages unless it compiles.
    "two tensor-parallel ranks": ("zero_branch", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
}


def environment(folder):
    """Return the environment of vLLM: 1 GiB of cache and one thread per process, and modelling files in `folder`."""
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # Tensor-parallel ranks would compile part of the embedding, on a busy machine for longer than vLLM waits (300 s).
    cpu |= {"TORCHDYNAMO_DISABLE": "1"}
    # Each process would compile vLLM's and torch's modules again, for 20 s.
    files = {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | cpu | files | {"VLLM_NO_USAGE_STATS": "1"}


def results_of(script, arguments, folder):
    """Return what a script of this folder writes in the environment of the engines, given its arguments as JSON."""
    given, found = (folder / f"{script} {kind}.json" for kind in ("arguments", "results"))
    given.write_text(json.dumps(arguments))
    command = [PYTHON, Path(__file__).with_name(script), given, found]
    subprocess.run(command, check=True, cwd=folder, env=environment(folder))
    return json.loads(found.read_text())


@pytest.fixture(scope="session")
def models(config, mesh_of, tmp_path_factory):
    """Return difftx's model and the exported folder by name."""
    folder, found = tmp_path_factory.mktemp("engines"), {}
    for name in (*SERVED, "top_k"):
        # vLLM's attention on CPUs has heads of 32 channels, and no narrower ones.
        lm, _, exported_to = exported(config, mesh_of(), name, folder / name, value_width=32)
        found[name] = lm, str(exported_to)
    return found


@pytest.fixture(scope="session")
def greedy(models, tmp_path_factory):
    """Return difftx's greedy tokens by model, and the results of vLLM by task, from one process."""
    requests = [Request(prompt=prompt, new_tokens=NEW_TOKENS, seed=0) for prompt in PROMPTS]
    ours = {
        name: [completion.tokens for completion in generate(lm, requests, GREEDY)] for name, (lm, _) in models.items()
    }
    chosen = {name: (name, {}) for name in models} | SHARDED
    chosen |= {f"{name} in bfloat16": (name, {"dtype": "bfloat16"}) for name in BFLOAT16}
    common = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "vocabulary": END_OF_TEXT + 1}
    tasks = {
        task: common | {"folder": models[name][1], "options": {"dtype": "float32"} | options}
        for task, (name, options) in chosen.items()
    }
    return ours, results_of("in_vllm.py", tasks, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("task", [*SERVED, *SHARDED])
def test_vllm_writes_the_greedy_text_of_difftx(greedy, task):
    ours, results = greedy
    theirs = [[token for token in tokens if token != END_OF_TEXT] for tokens in results[task]["tokens"]]
    assert theirs == ours[SHARDED.get(task, (task,))[0]]
    assert sum(map(len, theirs)) > 10 * len(theirs)


@pytest.mark.parametrize("name", BFLOAT16)
def test_vllm_keeps_lambda_in_float32(greedy, name):
    dtypes = greedy[1][f"{name} in bfloat16"]["dtypes"]
    lambdas = {name for name in dtypes if "lambda" in name or name.endswith("progress")}
    assert {dtypes[name] for name in lambdas} == {"torch.float32"}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("weight")} == {"torch.bfloat16"}


def test_vllm_refuses_a_model_that_is_not_servable(greedy):
    assert "architecture 'top_k' is not servable" in greedy[1]["top_k"]["error"]


def test_norms_of_sglang_compute_those_of_the_folder(config, mesh_of, tmp_path):
    # In `models`, heads are as wide as the model, so a norm of heads with the model's width would not fail.
    made = {name: exported(config, mesh_of(), name, tmp_path / name) for name in SERVED}
    results = results_of("in_sglang.py", {name: str(folder) for name, (_, _, folder) in made.items()}, tmp_path)
    assert not {name: result for name, result in results.items() if "error" in result}
    assert max(result["change"] for result in results.values()) < 1e-6
    assert all(result["norms"] > 2 * made[name][0].config.model.num_layers for name, result in results.items())


def test_the_documented_command_serves_the_texts_of_difftx(tmp_path):
    """Compare texts of a trained model by the script for GPUs, with the command of docs/serving.md."""
    difftx.train("quickstart:diff", tmp_path / "run", steps=30)
    folder = export(tmp_path / "run", tmp_path / "mine-hf")
    page = (ROOT / "docs" / "serving.md").read_text()
    (serve,) = (line for line in page.splitlines() if line.startswith("vllm serve"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [sys.executable, ROOT / "benchmarks" / "served_texts.py", folder.name, f"--port={port}", "--"]
    command = [Path(PYTHON).with_name("vllm"), *shlex.split(serve)[1:], *FLAGS]
    options = {"cwd": tmp_path, "env": environment(tmp_path), "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run([*script, *command], **options)
    assert "20 of 20 greedy texts are equal" in done.stdout
    assert done.returncode == 0
