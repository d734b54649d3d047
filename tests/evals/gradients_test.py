"""Gradient norms, compared with JAX's gradient of an independent implementation of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.evals_params import one_device, random_params

from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.gradients import initial_configs
from difftx.model.architectures import ARCHITECTURES
from difftx.parallel.mesh import make_mesh
from difftx.training.run import Run
from difftx.training.state import init_state

ROWS = 3  # Rows of 32 tokens. A batch has eight rows, so it has filler rows.


def loss(layers, embedding_VD, final_scale, tokens, targets, bias, *, scale, norm):
    """Return the loss in nats per token by Eq. 1 to 5, or that of a Transformer if `layers` have "query_DHd".

    The rows are computed one at a time. `bias` `[B, L, H, G, T, T]` is added to the logits of differential attention.
    """

    def rms(x, gain):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * gain[None]

    def turn(x_Td):
        half = x_Td.shape[1] // 2
        angle = jnp.arange(len(x_Td))[:, None] * 10_000.0 ** (-jnp.arange(half) / half)[None]
        a, b = x_Td[:, :half], x_Td[:, half:]
        return jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=1
        )

    def softmax_weights(h, w_q, w_k, bias_TT=0.0):
        logits = turn(h @ w_q) @ turn(h @ w_k).T / np.sqrt(w_q.shape[1]) + bias_TT
        return jax.nn.softmax(jnp.where(np.tri(len(h)) > 0, logits, -jnp.inf))

    def attention(w, h, depth, bias_HGTT):
        if "query_DHd" in w:
            heads = [
                softmax_weights(h, w["query_DHd"][:, n], w["key_DKd"][:, n]) @ (h @ w["value_DKd"][:, n])
                for n in range(w["query_DHd"].shape[1])
            ]
            return sum(head @ w["output_HdD"][n] for n, head in enumerate(heads))
        lambda_init = 0.8 - 0.6 * np.exp(-0.3 * depth)
        exponents = jnp.sum(w["lambda_query_Gd"] * w["lambda_key_Gd"], axis=1)
        lam = jnp.exp(exponents[0]) - jnp.exp(exponents[1]) + lambda_init
        out = 0.0
        for n in range(w["query_DHGd"].shape[1]):
            weights1, weights2 = (
                softmax_weights(h, w["query_DHGd"][:, n, g], w["key_DKGd"][:, n, g], bias_HGTT[n, g]) for g in (0, 1)
            )
            head = (weights1 - lam * weights2) @ (h @ w["value_DKE"][:, n])
            head = rms(head, w["head_norm"]["scale"]) if norm else head
            out += (head * (1 - lambda_init) if scale else head) @ w["output_HED"][n]
        return out

    def row(tokens_T, targets_T, bias_LHGTT):
        x = embedding_VD[tokens_T]
        for depth, layer in enumerate(layers):
            h = rms(x, layer["attention_norm"]["scale"])
            x = x + attention(layer["attention"], h, depth, bias_LHGTT[depth])
            h, mlp = rms(x, layer["mlp_norm"]["scale"]), layer["mlp"]
            x = x + (jax.nn.silu(h @ mlp["gate_DF"]) * (h @ mlp["up_DF"])) @ mlp["down_FD"]
        logits = rms(x, final_scale) @ embedding_VD.T
        return -jax.nn.log_softmax(logits)[jnp.arange(len(targets_T)), targets_T]

    return jnp.mean(jax.vmap(row)(tokens, targets, bias))


def gradient_by_hand(run, params, **parts):
    """Return the loss of the first rows, and its gradients with respect to the layers' parameters and the logits."""
    params = jax.tree.map(np.asarray, jax.device_get(params))
    layers = [jax.tree.map(lambda a, depth=depth: a[depth], params["blocks"]) for depth in range(2)]
    rows = [run.data.valid["valid"][i] for i in range(ROWS)]
    data = [np.stack([row[name] for row in rows]) for name in ("tokens", "targets")]
    embedding_VD = jnp.asarray(params["embedding_VD"])
    bias_BLHGTT = np.zeros((ROWS, 2, run.config.model.num_heads, 2, *[data[0].shape[1]] * 2), np.float32)

    def by_hand(layers, bias):
        return loss(layers, embedding_VD, params["final_norm"]["scale"], *data, bias, **parts)

    value, (gradient, by_logits) = jax.jit(jax.value_and_grad(by_hand, argnums=(0, 1)))(layers, bias_BLHGTT)
    return float(value), [jax.tree.map(np.asarray, layer) for layer in gradient], np.float64(by_logits)


def cosine(a, b):
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def expected_norms(gradient):
    found = {}
    for layer in gradient:
        matrices = {f"mlp_{name}": layer["mlp"][f"{name}_{axes}"] for name, axes in MLP.items()}
        for name, w in layer["attention"].items():
            short = name.split("_")[0]
            if name.endswith("Gd") and short != "lambda":
                matrices |= {f"{short}_1": w[:, :, 0], f"{short}_2": w[:, :, 1]}
            elif short in ("query", "key", "value", "output"):
                matrices[short] = w
        for name, w in matrices.items():
            found.setdefault(name, []).append(np.sqrt(np.sum(np.float64(w) ** 2)))
    return found


MLP = {"gate": "DF", "up": "DF", "down": "FD"}


def open_run(config, text_file, tmp_path, devices, *args, **changes):
    made = config(*args, data__path=text_file, eval__gradients__tokens=ROWS * 32, model__num_heads=2, **changes)
    return Run.open(made, tmp_path, make_mesh(made.mesh, jax.devices()[:devices]))


def check(found, numbers, prefix, value, gradient):
    expected = expected_norms(gradient)
    assert found["norms"].keys() == expected.keys()
    for name, norms in expected.items():
        np.testing.assert_allclose(found["norms"][name], norms, rtol=2e-4, err_msg=name)
        assert numbers[f"{prefix}_{name}_norm"] == pytest.approx(np.linalg.norm(norms), rel=2e-4)
    assert numbers[f"{prefix}_loss"] == pytest.approx(value, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "axes"),
    [("diff", {"fsdp": 2, "tensor": 2}), pytest.param("transformer", {}, marks=pytest.mark.exhaustive)],
)
def test_norms_and_cosines_of_a_checkpoint(config, text_file, tmp_path, name, axes):
    changes = {f"mesh__{axis}": size for axis, size in axes.items()}
    devices = int(np.prod(list(axes.values())))
    changes["eval__gradients__at_initialization"] = ""
    run = open_run(config, text_file, tmp_path, devices, name, **changes)
    params = random_params(run)
    result = evals.evaluate(run, params, 0, ["gradients"])["gradients"]
    value, gradient, by_logits = gradient_by_hand(run, params, scale=True, norm=True)
    found = result.details["by_layer"]["checkpoint"]
    check(found, result.numbers, "checkpoint", value, gradient)
    cosines = {}
    for layer in gradient if name == "diff" else []:
        for pair, weight in (("query", "query_DHGd"), ("key", "key_DKGd")):
            cosines.setdefault(pair, []).append(cosine(*(layer["attention"][weight][:, :, g] for g in (0, 1))))
    if name == "diff":
        cosines["logits"] = [cosine(*(by_logits[:, layer, :, g] for g in (0, 1))) for layer in range(2)]
    assert found["cosines"].keys() == cosines.keys()
    for pair, of_layers in cosines.items():
        np.testing.assert_allclose(found["cosines"][pair], of_layers, atol=1e-4)
        assert result.numbers[f"checkpoint_{pair}_cosine"] == pytest.approx(np.mean(of_layers), abs=1e-4)
    chart = result.charts[0]
    assert (chart.name, chart.log_y, chart.series[0].x) == ("gradients_checkpoint", True, [1.0, 2.0])
    assert {line.name for line in chart.series} == found["norms"].keys()


@pytest.mark.exhaustive
def test_norms_at_initialization_equal_a_calculation_by_hand(config, text_file, tmp_path):
    """Compare the norms at initialization with norms for parameters of the same seed.

    The output matrices of the run start at zero, but those of the suite's initial models do not.
    """
    arms = {"no_scale": (False, True), "no_norm": (True, False), "counterpart": (True, True)}
    changes = {"eval__gradients__at_initialization": ",".join(arms), "model__zero_init_output": "true"}
    run = open_run(config, text_file, tmp_path, 1, **changes)
    result = evals.evaluate(run, random_params(run), 0, ["gradients"])["gradients"]
    assert result.details["by_layer"].keys() == {"checkpoint", *arms}
    for arm, (scale, norm) in arms.items():
        start = initial_configs(run.config)[arm]
        with jax.set_mesh(run.mesh):
            params = jax.jit(lambda start=start: init_state(start).params)()
        assert np.any(params["blocks"]["mlp"]["down_FD"])
        value, gradient, _ = gradient_by_hand(run, params, scale=scale, norm=norm)
        check(result.details["by_layer"][arm], result.numbers, f"initial_{arm}", value, gradient)
    assert "query_1" not in result.details["by_layer"]["counterpart"]["norms"]


def test_gradients_by_rounded_logits_are_refused(config, text_file, tmp_path):
    """Only architectures that subtract have gradients by the logits of A1 and A2."""
    fields = {"data__path": text_file, "model__attention_logit_bits": "8"}
    runs = [Run.open(config(name, **fields), tmp_path / name, one_device()) for name in ("transformer", "diff")]
    evals.check_run(runs[0], ["gradients"])
    with pytest.raises(UserError, match=r"model\.attention_logit_bits=8: the suite 'gradients' .*; leave out"):
        evals.check_run(runs[1], ["gradients"])


def test_initial_configs_of_an_architecture(config):
    def arms(name, **changes):
        return list(initial_configs(config(name, **changes)))

    assert arms("transformer") == ["as_configured", "counterpart"]
    assert arms("diff", model__head_norm="none") == ["as_configured", "no_scale", "counterpart"]
    assert arms("gated") == ["as_configured"]
    assert arms("signed_mask") == ["as_configured", "no_scale", "no_norm", "no_scale_no_norm"]
    odd = config("transformer", model__num_heads=1)
    with pytest.raises(UserError, match=r"model\.num_heads=1: .*eval\.gradients\.at_initialization"):
        initial_configs(odd)
    without = dataclasses.replace(odd.eval.gradients, at_initialization=("as_configured",))
    assert list(initial_configs(dataclasses.replace(odd, eval=dataclasses.replace(odd.eval, gradients=without))))


def test_queries_of_variants_are_divided_by_signal_and_noise(config, mesh_of):
    """Neighbouring query heads of V2 form a pair. The last query of a group belongs to the noise head."""
    from difftx.evals.gradients import matrices

    with jax.set_mesh(mesh_of(fsdp=2, tensor=2)):
        shapes = {
            name: jax.eval_shape(lambda c=c: matrices(c.model, init_state(c).params["blocks"]))
            for name, c in {
                "diff_v2": config("diff_v2", model__num_heads=4),
                "gda": config("gda", model__num_heads=6, model__gda__signal_heads=3),
                "gdla": config("gdla", model__num_heads=8, model__gdla__signal_heads=2),
                "sink": config("sink"),
            }.items()
        }
    mlp = {"mlp_gate", "mlp_up", "mlp_down"}
    assert shapes["diff_v2"].keys() == mlp | {"query_1", "query_2", "key", "value", "output", "lambda"}
    assert shapes["gda"]["query_1"].shape == (2, 32, 2, 3, 4)
    assert shapes["gda"]["query_2"].shape == (2, 32, 2, 1, 4)
    assert shapes["gdla"]["query_1"].shape == (2, 32, 4, 2, 4)
    assert shapes["gdla"]["query_2"].shape == (2, 32, 4, 1, 4)
    assert shapes["sink"].keys() == mlp | {"query", "key", "value", "output"}
    heads, v2 = jnp.arange(8.0)[None, None, :, None], config("diff_v2", model__num_heads=4)
    with jax.set_mesh(mesh_of()):
        found = ARCHITECTURES["diff_v2"].matrices_by_group(v2.model, "query", heads)
    assert found["query_1"].ravel().tolist() == [0, 2, 4, 6]
    assert found["query_2"].ravel().tolist() == [1, 3, 5, 7]
