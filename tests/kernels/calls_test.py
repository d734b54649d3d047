"""Attention functions in other programs than difftx: NumPy arrays, `jax.vmap`, and meshes with automatic axes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels_checks import TOLERANCE, relative_error
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from difftx import kernels
from difftx.kernels import AttentionCall, weight_functions
from kernels import oracle

RNG = np.random.default_rng(0)
ARRAYS = [RNG.normal(size=shape).astype(np.float32) for shape in ((8, 12, 4, 2, 8), (8, 12, 2, 2, 8), (8, 12, 2, 16))]
IDS_BT = np.sort(RNG.integers(0, 3, (8, 12)))
OPTIONS = {"segment_ids_BT": IDS_BT, "window": 5}
EXPECTED = oracle.diff_attention(*ARRAYS, 0.3, IDS_BT, 5)

# A call of each function. All calls have the same result, given q, k and v of differential attention.
CALLS = {
    "diff_attention": lambda q, k, v, **options: kernels.diff_attention(q, k, v, 0.3, **options),
    "weighted_attention": lambda q, k, v, **options: kernels.weighted_attention(
        weight_functions.difference, q, k, v, weight_argument=0.3, **options
    ),
    "attention": lambda q, k, v, **options: jnp.concatenate(
        [
            kernels.attention(q[..., 0, :], k[..., 0, :], half, **options)
            - 0.3 * kernels.attention(q[..., 1, :], k[..., 1, :], half, **options)
            for half in (v[..., :8], v[..., 8:])
        ],
        axis=-1,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=[pytest.mark.long] * (name != "diff_attention"))
        for name, call in CALLS.items()
    ],
)
def test_numpy_arrays_and_vmap(call, dtype):
    arrays = [x.astype(dtype) for x in ARRAYS]
    out_BTHE = call(*arrays, **OPTIONS)
    assert out_BTHE.dtype == dtype
    assert relative_error(out_BTHE, oracle.diff_attention(*arrays, 0.3, IDS_BT, 5)) < TOLERANCE[dtype]

    def loss(arrays, ids_BT):
        out_BTHE = call(*arrays, segment_ids_BT=ids_BT, window=5)
        return jnp.sum(jnp.sin(out_BTHE.astype(jnp.float32)))

    in_pairs = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), (arrays, IDS_BT))
    grads = jax.jit(jax.vmap(jax.grad(loss)))(*in_pairs)
    for grad, expected in zip(grads, jax.jit(jax.grad(loss))(arrays, IDS_BT), strict=True):
        assert relative_error(grad.reshape(expected.shape), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 3e-2)])
def test_names_and_scale_are_those_of_jax(scale, dtype, atol):
    q, k, v = (x.astype(dtype) for x in ARRAYS)
    groups = [{"query": q[..., g, :], "key": k[..., g, :]} for g in (0, 1)]
    halves = [[{**group, "value": half} for half in (v[..., :8], v[..., 8:])] for group in groups]
    call = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=scale))
    a1, a2 = (np.concatenate([np.float32(call(**half)) for half in group], axis=-1) for group in halves)
    found = kernels.diff_attention(query=q, key=k, value=v, lam=0.3, scale=scale)
    np.testing.assert_allclose(np.float32(found), a1 - np.float32(0.3) * a2, atol=atol)
    options = {"weight_function": weight_functions.softmax, "scale": scale}
    one = halves[0][0]
    for found in (kernels.attention(**one, scale=scale), kernels.weighted_attention(**one, **options)):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.float32(found), a1[..., :8], atol=atol)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_without_rows_and_rows_without_tokens_have_empty_results(call):
    mesh = jax.make_mesh((4, 2), ("rows", "tokens"))
    for arrays in ([x[:0] for x in ARRAYS], [x[:, :0] for x in ARRAYS]):
        expected = (*arrays[0].shape[:3], 16)
        assert call(*arrays).shape == expected
        grads = jax.grad(lambda arrays: jnp.sum(call(*arrays)))(arrays)
        assert [grad.shape for grad in grads] == [x.shape for x in arrays]
        with jax.set_mesh(mesh):
            out_BTHE = jax.jit(lambda arrays: call(*arrays))(jax.device_put(arrays, jax.P("rows", "tokens")))
        assert (out_BTHE.shape, out_BTHE.sharding.spec[:2]) == (expected, ("rows", "tokens"))


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_automatic_axes_shard_rows_and_heads(call, is_set):
    mesh = jax.make_mesh((4, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    arrays = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", None, "heads"))) for x in ARRAYS]
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        out_BTHE = jax.jit(lambda arrays: call(*arrays, **OPTIONS))(arrays)
    assert relative_error(out_BTHE, EXPECTED) < TOLERANCE["float32"]
    assert out_BTHE.addressable_shards[0].data.shape == (2, 12, 2, 16)


@pytest.mark.parametrize(("kind", "is_partitioned"), [("Auto", True), ("Explicit", False), ("Manual", False)])
def test_no_pallas_kernel_is_selected_where_xla_would_have_to_partition_it(kind, is_partitioned):
    """XLA partitions one program over automatic axes only. Inside `jax.shard_map`, all axes are manual."""
    shapes = (2, 1024, 4, 2, 64), (2, 1024, 4, 2, 64), (2, 1024, 4, 128)
    call = AttentionCall(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    tpu = AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
    for devices, expected in {1: "splash_wide", 4: "xla" if is_partitioned else "splash_wide"}.items():
        mesh = AbstractMesh((devices,), ("rows",), axis_types=(getattr(AxisType, kind),), abstract_device=tpu)
        with jax.sharding.use_abstract_mesh(mesh):
            assert kernels.choose("diff_attention", "auto", call).name == expected
            if expected == "xla":
                with pytest.raises(ValueError, match="cannot partition a Pallas kernel over the mesh axes 'rows'"):
                    kernels.choose("diff_attention", "pallas_tpu", call)
