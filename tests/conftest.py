"""Fixtures of all tests, and eight virtual CPU devices, so that sharding code runs as on a pod.

| mark | tests with this mark | command |
|---|---|---|
| none | fast tests of every part | make test |
| long | whole commands, several processes, failing systems, many compiled programs | make test-long |
| chaos | random faults in real processes | make chaos |
| interpreter | kernels in Pallas's interpreters, with race detection | make test-compile |
| exhaustive | cases between those that the other commands run | make test-exhaustive |

Modules that several tests share are in tests/helpers. An oracle is next to the tests that use it.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("GLIBC_TUNABLES", "")  # Otherwise each command would start twice (difftx/console.py).
os.environ["HF_HUB_OFFLINE"] = "1"  # Without a network, a name that the hub lacks would be looked up for 20 s.
# Implicit broadcasting between ranks is an error. Processes that tests start inherit the variable.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# The suite mostly compiles tiny programs, which takes half the time without LLVM's expensive passes. Several threads
# per operation would only wait for the cores, which run other tests. `make quickstart` uses the default options.
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
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from difftx import compilation_cache

if TYPE_CHECKING:  # pytest-xdist's main process runs no test, so that it need not import JAX for three seconds.
    import jax

    from difftx.config import Config

gc.set_threshold(200_000, 50, 1000)  # Collections of JAX's many objects took a twentieth of the suite's time.
compilation_cache.enable()  # All tests, and the processes that they start, share the user's cache.

ROOT = Path(__file__).parent.parent
pytest_plugins = ["helpers.buckets", "helpers.hub_server"]

TINY = {
    "model.d_model": "32",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.mlp_dim": "64",
    "model.zero_init_output": "false",  # Any two models whose branches are zero would agree.
    "data.sequence_length": "32",
    "train.global_batch_tokens": "256",
    "train.steps": "6",
    "optimizer.warmup_steps": "2",
    "mesh.fsdp": "1",
}


def _fitted(architecture: str, fields: dict[str, object]) -> "Config":
    """Return a tiny config of an architecture, with fields by their full names."""
    from difftx.config.recipes import load_config
    from difftx.training.fit import fit

    changes = TINY | {name: str(value) for name, value in fields.items()}
    return fit(load_config(f"{ROOT}/configs/quickstart.py:{architecture}", changes))


def suite_config(folder: Path, window: int, **changes: object) -> "Config":
    """Return a tiny config with rows of `window` tokens of `folder`/text.txt, and `changes` by full field names."""
    fields = {"data.sequence_length": window, "train.global_batch_tokens": 8 * window, "mesh.fsdp": 8}
    fields |= {"data.path": folder / "text.txt"} | changes
    return _fitted("diff", fields)


@pytest.fixture(scope="session")
def config() -> "Callable[..., Config]":
    """Return a function from an architecture and overrides, such as `model__d_model=64`, to a tiny config."""

    def make(architecture: str = "diff", **overrides: object) -> "Config":
        return _fitted(architecture, {name.replace("__", "."): value for name, value in overrides.items()})

    return make


@pytest.fixture(scope="session")
def mesh_of() -> "Callable[..., jax.sharding.Mesh]":
    """Return a function from axis sizes to a mesh over as many of the eight devices as the sizes require."""
    import jax

    from difftx.config import MeshConfig
    from difftx.parallel.mesh import make_mesh

    def make(**sizes: int) -> jax.sharding.Mesh:
        axes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
        config = MeshConfig(**axes, context_method="heads", slices=1, preset="none")
        return make_mesh(config, jax.devices()[: math.prod(axes.values())])

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def write_text(path: Path) -> Path:
    """Write varied text that is long enough to become several documents."""
    lines = (f"line {i}: the square of {i} is {i * i}, and its cube is {i**3}.\n" for i in range(4000))
    path.write_text("".join(lines))
    return path


def child_environment(devices: int) -> dict[str, str]:
    """Return the environment of a process with `devices` CPU devices.

    It writes no bytecode, because Python leaves cut files if a test limits the size of the process's files.
    """
    return os.environ | {
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}"),
    }


def replace(config: "Config", group: str, **changes: object) -> "Config":
    """Return the config with some fields of one group replaced."""
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **changes)})
