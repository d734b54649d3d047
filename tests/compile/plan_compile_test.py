"""`difftx plan` for absent TPUs: libtpu's HLO is parsed correctly, and the committed table is up to date."""

import os
import re
import subprocess
import sys

os.environ.update(  # Must be set before libtpu loads. Without the last variable, a second process aborts.
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from jax import P

from compile import h200
from difftx.config import MeshConfig
from difftx.launch.estimate import estimate
from difftx.launch.hlo import list_collectives
from difftx.launch.topology import CHIPS, find_devices, parse_topology
from difftx.parallel.mesh import make_mesh

pytest.importorskip("libtpu", reason="libtpu is not installed: nothing can be compiled for TPU")
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_table

SMALLEST = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}


def collectives(topology, body):
    """Return the collectives of `body`, compiled for 1,024 float32 numbers on each device."""
    devices = find_devices(parse_topology(topology))
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    numbers = jax.ShapeDtypeStruct((1024 * len(devices),), jnp.float32, sharding=jax.NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        call = jax.shard_map(body, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return list_collectives(jax.jit(call).lower(numbers).compile().as_text())


def test_a_loop_counts_as_often_as_it_runs():
    """Collectives count once per iteration, although libtpu drops XLA's trip counts."""

    def gather(x, _):
        return jnp.tanh(jax.lax.all_gather(x, "x", tiled=True)).reshape(4, -1).sum(0), None

    found = collectives("v5p:2x2x1", lambda x: jax.lax.scan(gather, x, length=5)[0])
    assert sum(c.sent_bytes for c in found) == 5 * 3 * 4096


@h200.needs_plugin
def test_the_command_needs_no_variable_of_jax():
    """If `plan` did not select the CPU, JAX would open a GPU and fail without cuDNN."""
    command = [sys.executable, "-m", "difftx", "plan", "--config=configs/quickstart.py:diff", "--topology=a100:1"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "1 × NVIDIA A100-SXM4-80GB" in result.stdout
    assert "of 68.5 GiB" in result.stdout  # The 92 % of 80 GB that a training takes.


def test_traffic_inside_and_between_slices():
    found = collectives("v5e:2x2*2", lambda x: jax.lax.psum(x, "x"))
    inside, between = (sum(c.sent_bytes for c in found if c.between_slices is b) for b in (False, True))
    assert inside >= 2 * 4096 * 3 / 4
    # All bytes, not a quarter of them: libtpu 0.0.50 first reduces inside each slice, and then over all devices.
    assert between == 4096


def test_the_exchanges_of_muon_are_counted(config):
    """Muon exchanges each weight over four devices and over two, and back. It pads the two layers to eight."""
    found = {
        optimizer: estimate(
            config(optimizer__name=optimizer, mesh__fsdp=4, mesh__tensor=2, model__attention_implementation="xla"),
            find_devices(parse_topology("v5e:2x4")),
            CHIPS["v5e"],
        ).collectives
        for optimizer in ("adamw", "muon")
    }
    sent, before = (found[optimizer]["all-to-all"]["interconnect_bytes"] for optimizer in ("muon", "adamw"))
    layer = 4 * 32 * 32 + 3 * 32 * 64
    assert sent - before == 2 * (3 / 4 + 1 / 2) * 8 * layer * 4 / 8


def test_slices_split_only_the_data_axis():
    config = MeshConfig(data=4, fsdp=-1, context=1, tensor=1, context_method="heads", slices=2, preset="none")
    mesh = make_mesh(config, find_devices(parse_topology("v5e:2x4*2")))
    assert mesh.devices.shape == (4, 4, 1, 1)
    slices = [{device.slice_index for device in row.flat} for row in mesh.devices]
    assert slices == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize("kind", SMALLEST)
def test_memory_of_a_device_is_what_libtpu_says(kind):
    device = find_devices(parse_topology(f"{kind}:{SMALLEST[kind]}"))[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    too_much = jax.ShapeDtypeStruct((200 * 2**18, 1024), jnp.float32, sharding=sharding)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: x[0]).lower(too_much).compile()
    capacity = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(caught.value))
    assert capacity is not None
    assert float(capacity[1]) * 2**30 == CHIPS[kind].hbm_bytes


@pytest.mark.exhaustive
def test_smallest_row_of_the_plan_table_is_up_to_date(tmp_path):
    row = next(plan_table.rows("830m"))
    numbers = plan_table.measure(row, tmp_path / "plan.json")
    fresh = plan_table.cells(row, numbers)
    (line,) = [
        line for line in plan_table.PAGE.read_text().splitlines() if line.startswith(f"| {fresh[0]} | {row.topology} ")
    ]
    old = [cell.strip() for cell in line.strip("|").split("|")]
    column = plan_table.COLUMNS.index("GiB per device")
    gib, old_gib = (float(cells[column].split()[0]) for cells in (fresh, old))
    assert gib == pytest.approx(old_gib, rel=0.05), "run: python benchmarks/plan_table.py --write"
    assert old[2] == fresh[2]
    assert numbers["host_bytes"] < 6 * 2**30
