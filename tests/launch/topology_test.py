"""Names of devices that are not here."""

import sys

import jax
import pytest

from difftx.errors import UserError, install_hint
from difftx.launch.topology import CHIPS, Topology, find_devices, parse_topology, prepare
from difftx.model.flops import PEAK_FLOPS


@pytest.mark.parametrize(
    ("text", "kind", "shape", "slices"),
    [
        ("v5p:4x4x4", "v5p", (4, 4, 4), 1),
        ("v5e:16x16*2", "v5e", (16, 16), 2),
        ("TPU7x:2x2x1", "tpu7x", (2, 2, 1), 1),
        ("h200:8", "h200", (8,), 1),
        ("cpu:8", "cpu", (8,), 1),
    ],
)
def test_topologies(text, kind, shape, slices):
    topology = parse_topology(text)
    assert topology == Topology(kind, shape, slices)
    assert str(topology) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p", "write kind:shape"),
        ("v5p:4x4x", "write kind:shape"),
        ("v5p:4x4x4*", "write kind:shape"),
        ("v5q:4x4x4", "Did you mean 'v5"),
        ("v5p:0x4x4", "positive"),
        ("cpu:2x4", "cpu:8"),
        ("h200:8*2", "h200:16"),
    ],
)
def test_a_wrong_topology_says_how_it_is_written(text, message):
    with pytest.raises(UserError, match="--topology") as caught:
        parse_topology(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "extra"), [("v5p:2x2x1", "tpu"), ("h200:8", "cuda")])
def test_what_is_not_installed_is_named_with_its_extra(text, extra, monkeypatch):
    for name in ("libtpu", "jax_plugins", "jax_plugins.xla_cuda13"):
        monkeypatch.setitem(sys.modules, name, None)  # As if it could not be imported.
    with pytest.raises(UserError) as caught:
        prepare(parse_topology(text))
    assert install_hint(extra) in str(caught.value)


def test_virtual_cpus_share_the_memory_of_the_host():
    two, eight = (parse_topology(f"cpu:{n}").chip.hbm_bytes for n in (2, 8))
    assert two == 4 * eight
    assert find_devices(parse_topology("cpu:3")) == jax.devices()[:3]


def test_every_kind_has_a_peak():
    kinds = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
    kinds["h200"] = "NVIDIA H200"
    assert set(kinds) == set(CHIPS)
    assert set(kinds.values()) <= set(PEAK_FLOPS)
