"""The code of docs/layer.md, executed from top to bottom. tests/layer_test.py tests most of what the page shows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pages import DOCS, blocks

from difftx.config import ModelConfig
from difftx.config.fields import types_of
from difftx.layer import OTHER_FIELDS
from difftx.model.architectures import ARCHITECTURES
from difftx.parallel.layout import Layout

BLOCKS = blocks("layer.md", "python")


@pytest.fixture(scope="module")
def names():
    """The variables of the page after its last line."""
    found = {}
    for block in BLOCKS:
        exec(block, found)
    return found


def test_first_example_runs_and_has_at_most_ten_lines():
    names = {}
    exec(BLOCKS[0], names)
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 10
    y = names["apply"](names["layer"], names["x"])
    assert (y.shape, y.dtype) == (names["x"].shape, names["x"].dtype)


@pytest.mark.long
def test_all_architectures_are_on_the_page(names):
    architectures = [layer.attention.config.architecture for layer in names["layers"]]
    assert {"diff", *architectures} == set(ARCHITECTURES)
    assert {y.shape for y in names["outputs"]} == {names["x"].shape}


@pytest.mark.long
def test_the_model_learns_and_trains_on_all_devices(names):
    losses = names["losses"]
    assert losses[0] > np.log(16)
    assert np.mean(losses[-5:]) < 0.3
    assert names["loss"].sharding.device_set == set(jax.devices())
    assert float(names["loss"]) < 0.3
    shapes = jax.tree.map(lambda weight: (len(names["tokens"]), *weight.shape), names["model"])
    assert jax.tree.leaves(jax.tree.map(jnp.shape, names["grads"])) == jax.tree.leaves(shapes)


@pytest.mark.long
def test_the_linen_module_is_the_layer_with_its_weights(names):
    layer = names["DiffAttention"](64, 4, layer=2, rngs=names["nnx"].Rngs(0))
    parameters = names["variables"]["params"]["attention"]
    for name, boxed in parameters.items():
        weight = getattr(layer.attention, name)
        if name == "head_norm":
            weight, boxed = weight.scale, boxed["scale"]
        weight.set_value(boxed.value)
    np.testing.assert_allclose(names["y"], layer(names["x"]), atol=1e-6)


@pytest.mark.long
def test_the_examples_with_shardings_equal_the_plain_layer(names):
    assert names["y_explicit"].sharding.spec == jax.P("batch", None, None)
    assert names["y_sharded"].sharding.spec == Layout().act_BTD
    assert names["sharded_layer"].attention.query_DHGd.sharding.spec == Layout().query_DHGd
    expected = names["apply"](names["layer"], names["x"])
    for y in (names["y_explicit"], names["y_sharded"]):
        np.testing.assert_allclose(np.asarray(y)[:2], expected, atol=1e-5)


def test_the_table_has_every_argument():
    table = (DOCS / "layer.md").read_text().partition("| argument |")[2].partition("\n\n")[0]
    arguments = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:]))
    own = [cls.own_config for cls in ARCHITECTURES.values() if cls.own_config]
    fields = set(types_of(ModelConfig)).union(*map(types_of, own)) - OTHER_FIELDS - ARCHITECTURES.keys()
    fields -= {"anneal_steps"}  # A field of the optimizer.
    assert sorted(arguments) == sorted({"d_model", "num_heads", "rngs", "layer", *fields})
