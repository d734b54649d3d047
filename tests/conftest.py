"""Eight virtual CPU devices for every test, so that sharding code runs as it does on a pod."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Arrays of different ranks broadcast only where the code says so. Processes that tests start read it as well.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# The suite is mostly compilation of tiny programs: without LLVM's expensive passes it takes half the time. And an
# operation on several threads would only wait for what other tests do with the cores.
# tests/commands_test.py starts processes that compile as a user's do.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from difftx.config import Config, MeshConfig
from difftx.config.recipes import load_config
from difftx.parallel.mesh import make_mesh

ROOT = Path(__file__).parent.parent

TINY = {
    "model.d_model": "32",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.mlp_dim": "64",
    "model.zero_init_output": "false",  # Branches that are zero would agree with anything.
    "data.sequence_length": "32",
    "train.global_batch_tokens": "256",
    "train.steps": "6",
    "optimizer.warmup_steps": "2",
    "mesh.fsdp": "1",
}


def suite_config(folder: Path, window: int, **changes: object) -> Config:
    """Return a tiny config whose rows are `window` tokens of `folder`/text.txt; other fields by their full names."""
    fields = {"data.sequence_length": window, "train.global_batch_tokens": 8 * window, "mesh.fsdp": 8}
    fields |= {"data.path": folder / "text.txt"} | changes
    return load_config(
        f"{ROOT}/configs/quickstart.py:diff", TINY | {name: str(value) for name, value in fields.items()}
    )


@pytest.fixture
def config() -> Callable[..., Config]:
    """Return a function: architecture and overrides → a tiny config."""

    def make(architecture: str = "diff", **overrides: object) -> Config:
        changes = {name.replace("__", "."): str(value) for name, value in overrides.items()}
        path = ROOT / "configs" / "quickstart.py"
        return load_config(f"{path}:{architecture}", TINY | changes)

    return make


@pytest.fixture
def mesh_of() -> Callable[..., jax.sharding.Mesh]:
    """Return a function: axis sizes → a mesh over as many of the eight devices."""

    def make(**sizes: int) -> jax.sharding.Mesh:
        axes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
        config = MeshConfig(**axes, context_method="heads", slices=1, preset="none")
        return make_mesh(config, jax.devices()[: math.prod(axes.values())])

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def write_text(path: Path) -> Path:
    """Write some varied text, cut into several documents by its size."""
    lines = (f"line {i}: the square of {i} is {i * i}, and its cube is {i**3}.\n" for i in range(4000))
    path.write_text("".join(lines))
    return path


@functools.cache
def _compilation_cache() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="difftx-tests-")


def child_environment(devices: int) -> dict[str, str]:
    """Return the environment of a process with so many CPU devices; what one has compiled the next one finds."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}"),
        "JAX_COMPILATION_CACHE_DIR": _compilation_cache().name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def replace(config: Config, group: str, **changes: object) -> Config:
    """Return the config with fields of one group replaced."""
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **changes)})
