"""The command `difftx plan`, as a user calls it, for virtual CPU devices."""

import dataclasses
import json
import os

import jax
import pytest
from conftest import TINY
from helpers.command_server import commands

from difftx.commands.plan import with_slices
from difftx.errors import UserError
from difftx.launch import search
from difftx.launch.estimate import Estimate, _does_not_fit, estimate
from difftx.launch.topology import GIB, Chip, parse_topology
from difftx.model.flops import format_bytes

MESH = {"mesh.fsdp": "4", "mesh.tensor": "2"}  # The last two of FLAGS.
FLAGS = [f"--config.{name}={value}" for name, value in (TINY | MESH).items()]
CHIP = Chip(hbm_bytes=GIB, hbm_bandwidth=None, interconnect=None, network=None)


def plan(*flags):
    environment = os.environ | {"COLUMNS": "200"}
    return commands().run(["difftx", "plan", "--config=configs/quickstart.py:diff", *flags], environment=environment)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return the command's result and the numbers that it wrote."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = plan("--topology=cpu:8", f"--json={path}", *FLAGS)
    assert result.returncode == 0, result.stderr
    (numbers,) = json.loads(path.read_text())
    return result, numbers


def test_the_table_has_every_number(planned):
    result, numbers = planned
    for part in ("8 × cpu", "fsdp=4 tensor=2", "arguments", "temporaries", "all-gather", "executed", "fits"):
        assert part in result.stdout
    assert f"{numbers['steps'] * numbers['step_tokens']:.4g}" in result.stdout
    assert result.stderr == ""


def test_arguments_are_a_devices_share_of_state_and_batch(planned):
    _, numbers = planned
    # Projections and the embedding are sharded over all eight devices, in float32 with two moments, and rows over four.
    cut = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 264 * 32
    whole = 2 * (2 * 32 + 4 * 8 + 16) + 32  # Norm gains and the vectors of λ.
    batch = 3 * 256 * 4 / 4
    assert numbers["argument_bytes"] == pytest.approx(3 * 4 * (cut / 8 + whole) + batch, rel=0.01)
    assert numbers["argument_bytes"] <= numbers["needed_bytes"]
    assert numbers["devices"] == 8


def test_collectives_include_the_gathers_of_the_layers(planned):
    """Both layers gather their parameters. On one host, no collective uses the network."""
    _, numbers = planned
    kinds = numbers["collectives"]
    gathered = 2 * (4 * 32 * 32 + 3 * 32 * 64) * 4 / 2 * 3 / 4  # float32, half of them per tensor shard.
    assert kinds["all-gather"]["interconnect_bytes"] >= gathered
    assert all(kind["network_bytes"] == 0 for kind in kinds.values())


@pytest.mark.long
def test_frozen_parameters_have_no_moments(planned, tmp_path):
    path = tmp_path / "plan.json"
    result = plan("--topology=cpu:8", f"--json={path}", *FLAGS, "--config.train.trainable=blocks/attention/lambda_*")
    assert result.returncode == 0, result.stderr
    frozen_cut = (
        2 * (4 * 32 * 32 + 3 * 32 * 64) + 264 * 32
    )  # See `test_arguments_are_a_devices_share_of_state_and_batch`.
    frozen_whole = 2 * (2 * 32 + 16) + 32
    (numbers,) = json.loads(path.read_text())
    saved = planned[1]["argument_bytes"] - numbers["argument_bytes"]
    assert saved == pytest.approx(2 * 4 * (frozen_cut / 8 + frozen_whole), rel=0.01)
    assert f", {format_bytes(2 * 4 * (frozen_cut + frozen_whole))} less than if all parameters" in result.stdout
    assert numbers["executed_flops"] < 0.8 * planned[1]["executed_flops"]


@pytest.mark.long
def test_the_exchanges_of_muon_are_counted(planned, config):
    """Muon exchanges each weight over four devices and over two, and back. It pads the two layers to eight."""
    c = config(optimizer__name="muon", mesh__fsdp=4, mesh__tensor=2)
    found, (_, adamw) = estimate(c, jax.devices(), CHIP), planned
    sent, sent_before = (
        kinds["all-to-all"]["interconnect_bytes"] for kinds in (found.collectives, adamw["collectives"])
    )
    layer = 4 * 32 * 32 + 3 * 32 * 64
    assert sent - sent_before == 2 * (3 / 4 + 1 / 2) * 8 * layer * 4 / 8
    assert adamw["argument_bytes"] - found.argument_bytes == pytest.approx(2 * layer * 4 / 8, abs=8)  # One moment less.


@pytest.mark.long
def test_a_config_that_does_not_fit_reports_the_excess():
    preset = ["--config.mesh.preset=auto", "--config.model.remat=full"]  # The preset for CPUs has remat=none.
    result = plan("--topology=cpu:1", "--hbm_gib=0.0001", *FLAGS[:-2], "--config.model.num_layers=1", *preset)
    assert result.returncode == 2
    assert "does not fit" in result.stdout
    assert "remat=none" in result.stdout
    assert result.stderr.count("\n") == 1
    assert "GiB too much" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v5q:2x2"], "Did you mean"),
        (["--topology=cpu:8", "--config.mesh.fsdp=3"], "mesh.fsdp=3"),
        (["--topology=cpu:8", "--config.mesh.slices=2", "--config.mesh.data=2"], "mesh.slices=2"),
        (["--topology=cpu:8", "--config.model.num_head=3"], "Did you mean 'num_heads'"),
        (["--topology=cpu:8", "--json=no/such/folder/x.json"], "no/such/folder"),
        (["--topology=cpu:8", "--efficiency=2"], "--efficiency"),
        (["--topology=cpu:8", "--hbm_gib=-1"], "--hbm_gib"),
    ],
)
def test_a_mistake_ends_with_2_and_its_reason(flags, message):
    result = plan(*flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_slices_come_from_the_topology(config):
    two = parse_topology("v5e:4x4*2")
    sliced = with_slices(config(mesh__fsdp=-1), two)
    assert (sliced.mesh.slices, sliced.mesh.data) == (2, 2)
    assert with_slices(config(mesh__data=4, mesh__fsdp=8), two).mesh.data == 4
    assert with_slices(sliced, two) == sliced
    with pytest.raises(UserError, match=r"mesh.slices=2.*1 slices"):
        with_slices(sliced, parse_topology("v5e:4x4"))


def test_libtpus_own_message_is_understood():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (57.43G) exceeds available HBM (15.75G). HLO module: jit_step."
    )
    error = _does_not_fit(message)
    assert "41.68 GiB too much" in str(error)
    assert _does_not_fit("INTERNAL: something else") is None


@pytest.fixture
def estimated(planned):
    """Return the estimate whose numbers the command wrote."""
    fields = {field.name: planned[1][field.name] for field in dataclasses.fields(Estimate)}
    return Estimate(**fields | {"chip": Chip(**fields["chip"])})


def test_the_bound_is_the_slowest_of_arithmetic_collectives_and_state(estimated):
    e = estimated
    assert e.bound is None
    chip = Chip(hbm_bytes=GIB, hbm_bandwidth=1e30, interconnect=1e30, network=1e30)
    fast = dataclasses.replace(e, peak_flops=1e12, chip=chip)
    assert fast.bound.step_seconds == e.executed_flops / 1e12
    assert fast.bound.mfu == pytest.approx(e.model_flops / 8 / e.executed_flops)
    sent = sum(c["interconnect_bytes"] for c in e.collectives.values())
    slow = dataclasses.replace(fast, chip=dataclasses.replace(chip, interconnect=1.0))
    assert slow.bound.step_seconds == sent
    assert slow.bound.days == pytest.approx(e.steps * sent / 86_400)
    half = dataclasses.replace(fast, low_precision_flops=e.executed_flops / 2, low_precision_peak=2e12)
    assert half.bound.arithmetic_seconds == pytest.approx(0.75 * e.executed_flops / 1e12)
    slow = dataclasses.replace(fast, chip=dataclasses.replace(chip, hbm_bandwidth=1.0))
    assert slow.bound.step_seconds == e.argument_bytes + e.output_bytes


def test_search_finds_the_fastest_fit_and_skips_slower_candidates(config, estimated, monkeypatch):
    """A rule for the cost of remat and microbatches replaces compilation, so that the best choice is known."""
    tried = []

    def by_rule(c, devices, chip):
        tried.append((c.mesh.data, c.mesh.tensor, c.model.remat, c.train.accumulation))
        gib = {"none": 4, "dots": 2, "full": 1}[c.model.remat] / c.train.accumulation * c.mesh.data
        flops = {"none": 3, "dots": 3.1, "full": 4}[c.model.remat] * c.mesh.tensor
        changes = {"remat": c.model.remat, "accumulation": c.train.accumulation, "executed_flops": flops}
        return dataclasses.replace(estimated, **changes, allocated_bytes=int(gib * GIB), code_bytes=0, chip=CHIP)

    monkeypatch.setattr(search, "estimate", by_rule)
    c = config(train__global_batch_tokens=2048)
    lines = []
    found = search.search(c, jax.devices(), CHIP, report=lines.append)
    assert (found[0].remat, found[0].accumulation, found[0].executed_flops) == ("none", 4, 3)
    assert [e.executed_flops for e in found] == sorted(e.executed_flops for e in found)
    assert len(lines) == len(tried) == len(set(tried))
    assert (1, 1, "full", 2) not in tried  # remat=full fits with one microbatch.
    assert (1, 1, "none", 8) not in tried  # remat=none fits with four microbatches.
    assert {tensor for _, tensor, _, _ in tried} == {1, 2}  # The model has two heads.
