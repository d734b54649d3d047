import jax
import jax.numpy as jnp
import numpy as np
import pytest

from difftx.training.optimizer import decay_mask, learning_rate, make_optimizer


def test_schedule_is_linear_up_and_down(config):
    c = config(
        train__steps=100,
        optimizer__warmup_steps=10,
        optimizer__learning_rate=1e-2,
        optimizer__final_learning_rate=1e-3,
    )
    schedule = learning_rate(c)
    assert float(schedule(0)) == pytest.approx(1e-3)  # A tenth of the peak: the first update moves too.
    assert float(schedule(9)) == pytest.approx(1e-2)
    assert float(schedule(10)) == pytest.approx(1e-2)
    assert float(schedule(55)) == pytest.approx((1e-2 + 1e-3) / 2)
    assert float(schedule(100)) == pytest.approx(1e-3)
    assert float(learning_rate(config(optimizer__warmup_steps=0))(0)) == pytest.approx(4e-3)


@pytest.mark.parametrize("architecture", ["diff", "transformer", "sink"])
def test_decayed_are_the_matrices(config, mesh_of, architecture):
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(config(architecture)))
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decayed for path, decayed in mask}
    kept = {name for name, decayed in names.items() if not decayed}
    expected = {"blocks/attention_norm/scale", "blocks/mlp_norm/scale", "final_norm/scale"}
    if architecture == "diff":
        expected |= {f"blocks/attention/{n}" for n in ("head_norm/scale", "lambda_query_Gd", "lambda_key_Gd")}
    if architecture == "sink":
        expected.add("blocks/attention/sink_H")
    assert kept == expected


def test_update_equals_adamw_by_hand(config):
    """Algorithm 2 of arXiv 1711.05101 with clipping, float64, three updates."""
    c = config(optimizer__weight_decay=0.3, optimizer__b1=0.8, optimizer__b2=0.9, optimizer__clip_norm=0.5)
    optimizer = make_optimizer(c, {"w": True, "scale": False})
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "scale": jnp.ones(2)}
    expected = {name: np.asarray(p, np.float64) for name, p in params.items()}
    moments = {name: (0.0, 0.0) for name in params}
    state = optimizer.init(params)
    for n in range(3):
        grads = {name: jnp.asarray(rng.normal(size=p.shape), jnp.float32) for name, p in params.items()}
        updates, state = optimizer.update(grads, state, params)
        params = {name: params[name] + updates[name] for name in params}
        norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
        for name, grad in grads.items():
            g = np.float64(grad) * min(1, 0.5 / norm)
            m = 0.8 * moments[name][0] + 0.2 * g
            v = 0.9 * moments[name][1] + 0.1 * g**2
            moments[name] = (m, v)
            step = (m / (1 - 0.8 ** (n + 1))) / (np.sqrt(v / (1 - 0.9 ** (n + 1))) + 1e-8)
            decay = 0.3 * expected[name] if name == "w" else 0.0
            expected[name] = expected[name] - float(learning_rate(c)(n)) * (step + decay)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5)
