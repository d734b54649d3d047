"""The decoder: sharding, sizes of the paper's models, FLOPs, packed rows and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from helpers.model_layers import batch_on, parameters_of
from helpers.training_updates import shapes_of

from difftx.config.recipes import load_config
from difftx.data.loader import Batch
from difftx.kernels import cudnn
from difftx.launch.arithmetic import executed_flops
from difftx.launch.topology import CUDNN_VERSION
from difftx.model.abstract import count_parameters
from difftx.model.decoder import Decoder
from difftx.model.flops import flops_per_token
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import AXES, make_mesh
from difftx.training.loss import batch_loss
from difftx.training.state import graph, init_state


def loss_of(c):
    graphdef = graph(c)
    return lambda params, batch: batch_loss(nnx.merge(graphdef, params), batch)[0]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 4}])
def test_nothing_large_is_replicated(config, mesh_of, sizes):
    c = config(model__d_model=256, model__mlp_dim=1024, model__vocab_size=2048, model__num_heads=8, model__num_layers=4)
    with jax.set_mesh(mesh_of(**sizes)):
        state = jax.jit(lambda: init_state(c))()
    large = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.nbytes >= 2**20:
            large += 1
            assert leaf.addressable_shards[0].data.nbytes * 4 <= leaf.nbytes, jax.tree_util.keystr(path)
    assert large >= 24  # Eight matrices and their two moments.


@pytest.mark.parametrize("architecture", ["diff", "transformer"])
@pytest.mark.parametrize("size", ["830m", "1.4b", "2.8b", "6.8b", "13.1b"])
def test_models_have_the_sizes_of_table_10(mesh_of, architecture, size):
    c = load_config(f"{ROOT}/configs/scaling.py:{architecture}-{size}", {})
    with jax.set_mesh(mesh_of()):
        model = nnx.eval_shape(lambda: Decoder(c.model, rngs=nnx.Rngs(0)))
    total = sum(int(np.prod(p.shape)) for p in jax.tree.leaves(nnx.state(model)))
    billions = {"830m": 0.834, "1.4b": 1.410, "2.8b": 2.763, "6.8b": 6.837, "13.1b": 13.084}[size]
    assert round(total / 1e9, 3) == billions
    # The name of the size is the rounded total, as the paper prints it.
    assert size == (f"{total / 1e6:.0f}"[:2] + "0m" if total < 1e9 else f"{total / 1e9:.1f}b")
    assert count_parameters(c.model).total == total


def test_table_9_counts_to_3_48_billion():
    c = load_config(f"{ROOT}/configs/diff_3b.py:diff", {})
    assert round(count_parameters(c.model).total / 1e9, 2) == 3.48


def test_both_architectures_are_charged_the_same_flops():
    """FLOPs are 6 N + 12 L T d for the 2.8B models of Table 10, which differ only in vectors."""
    per_token = {}
    for architecture in ("diff", "transformer"):
        model = load_config(f"{ROOT}/configs/scaling.py:{architecture}-2.8b", {}).model
        per_token[architecture] = flops_per_token(model, 2048, causal=False)
    layers = 32 * (4 * 2560**2 + 3 * 2560 * 6784)
    assert per_token["diff"] == 6 * (layers + 100_288 * 2560) + 12 * 32 * 2048 * 2560
    assert per_token["transformer"] == per_token["diff"]


@pytest.mark.long
@pytest.mark.parametrize(
    "remat", ["dots", *(pytest.param(remat, marks=pytest.mark.exhaustive) for remat in ("full", "offload"))]
)
def test_remat_changes_nothing_but_memory(config, mesh_of, remat):
    results = {}
    for policy in ("none", remat):
        c = config(model__remat=policy)
        mesh = mesh_of()
        with jax.set_mesh(mesh):
            results[policy] = jax.jit(jax.grad(loss_of(c)))(parameters_of(c), batch_on(mesh, c))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), results["none"], results[remat])


KERNELS = [
    ("diff", "xla", "cpu"),
    ("diff", "pallas_tpu", "TPU v5"),
    ("diff", "splash_wide", "TPU v5"),
    ("diff", "pallas_gpu", "NVIDIA H100 80GB HBM3"),
    ("diff", "cudnn", "NVIDIA H100 80GB HBM3"),
    ("transformer", "cudnn", "NVIDIA H100 80GB HBM3"),
]


@pytest.mark.parametrize(("architecture", "kernel", "kind"), KERNELS)
def test_the_remat_policy_dots_repeats_no_matrix_product(config, architecture, kernel, kind):
    """The traced backward pass contains neither the products of linear layers nor the forward kernel again."""

    def flops(remat):
        options = {"model__attention_implementation": kernel, "model__compute_dtype": "bfloat16"}
        c = config(architecture, model__d_model=128, model__num_heads=1, model__remat=remat, **options)
        device = jax.sharding.AbstractDevice(kind, None, {"T": "tpu", "N": "cuda"}.get(kind[0], "cpu"))
        axes = (jax.sharding.AxisType.Explicit,) * len(AXES)
        mesh = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, axis_types=axes, abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh), cudnn.checked_for_target(CUDNN_VERSION):
            sharding = jax.NamedSharding(mesh, Layout().act_BT)
            tokens, mask = (jax.ShapeDtypeStruct((2, 128), t, sharding=sharding) for t in (jnp.int32, jnp.float32))
            batch = Batch(tokens_BT=tokens, targets_BT=tokens, loss_mask_BT=mask)
            return executed_flops(jax.jit(jax.grad(loss_of(c))).trace(shapes_of(c), batch).jaxpr)

    assert flops("dots") == flops("none") < flops("full")


@pytest.mark.long
def test_positions_and_segments_reach_attention(config, mesh_of):
    """Two documents packed in one row have the same logits as in rows of their own."""
    c = config()
    with jax.set_mesh(mesh_of()):
        model = jax.jit(nnx.merge(graph(c), parameters_of(c)))
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (1, 20)), jnp.int32)
        ids = jnp.asarray([[0] * 8 + [1] * 12], jnp.int32)
        positions = jnp.asarray([[*range(8), *range(12)]], jnp.int32)
        packed, _ = model(tokens, segment_ids_BT=ids, positions_BT=positions)
        first, second = model(tokens[:, :8])[0], model(tokens[:, 8:])[0]
    np.testing.assert_allclose(packed[:, :8], first, atol=1e-5)
    np.testing.assert_allclose(packed[:, 8:], second, atol=1e-5)


@pytest.mark.long
def test_bfloat16_stays_near_float32(config, mesh_of):
    with jax.set_mesh(mesh_of()):
        logits = {}
        for dtype in ("float32", "bfloat16"):
            c = config(model__compute_dtype=dtype)
            model = jax.jit(nnx.merge(graph(c), parameters_of(c)))
            logits[dtype], _ = model(jnp.arange(32, dtype=jnp.int32)[None])
            assert logits[dtype].dtype == jnp.float32
    assert float(jnp.abs(logits["bfloat16"] - logits["float32"]).max()) < 0.02


def test_mesh_errors_name_the_field(config):
    from difftx.errors import UserError
    from difftx.training.fit import fit

    with pytest.raises(UserError, match="do not multiply to the 8 devices"):
        make_mesh(config(mesh__fsdp=3).mesh)
    c = config(mesh__fsdp=2, mesh__tensor=4)
    with pytest.raises(UserError, match=r"model.num_heads: 2 .* mesh.tensor = 4 .* such as 4"):
        fit(c, make_mesh(c.mesh))
    c = config(mesh__fsdp=8, train__global_batch_tokens=128)
    with pytest.raises(
        UserError, match=r"train\.global_batch_tokens=128: 4 rows .* use a multiple of 256, such as 256"
    ):
        fit(c, make_mesh(c.mesh))
    with pytest.raises(UserError, match=r"mesh\.slices=2: it must divide .* number of slices, which is 1 here"):
        make_mesh(config(mesh__data=2, mesh__fsdp=4, mesh__slices=2).mesh)
    c = config(mesh__fsdp=1, mesh__context=8)
    with pytest.raises(UserError, match=r"model.num_heads: 2 .* mesh.tensor × mesh.context = 8 .* such as 8"):
        fit(c, make_mesh(c.mesh))
