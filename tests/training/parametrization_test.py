"""The coordinate check of µP (arXiv 2203.03466, appendix D.1): activations after some updates at many widths and depths."""
# Axes: B = rows, T = tokens, D = model width

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import ROOT
from flax import nnx
from helpers.model_layers import batch_on

from difftx.config.recipes import load_config
from difftx.model.attention import depth_schedule
from difftx.model.decoder import Decoder
from difftx.model.layers import rotary_angles
from difftx.training.state import graph, init_state, make_train_step

BASE = {"d_model": 64, "num_layers": 2, "head_dim": 16}
TOKENS, KINDS = 32, 8
UPDATES, SEEDS = 5, 4


def model_of(architecture, *, width=64, layers=2, mup=True, **changes):
    fields = {
        "model.d_model": width,
        "model.num_layers": layers,
        "model.num_heads": width // (BASE["head_dim"] * (2 if architecture == "diff" else 1)),
        "model.mlp_dim": 2 * width,
        "model.remat": "full",
        "model.compute_dtype": "float32",
        "data.sequence_length": TOKENS,
        "train.global_batch_tokens": 8 * TOKENS,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 4e-3,
        "mesh.fsdp": 1,
    }
    if mup:
        fields |= {"model.mup_base_width": 64, "model.mup_base_layers": 2, "model.mup_base_head_dim": 16}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(
        f"{ROOT}/configs/quickstart.py:{architecture}", {k: str(v) for k, v in (fields | changes).items()}
    )


def coordinates(c, mesh, updates=UPDATES, seeds=SEEDS):
    """Return the RMS of attention's and the MLP's outputs, of the residual stream and of the logits' change, by name.

    They are means over seeds.
    """
    batch = batch_on(mesh, c)
    tokens_BT = np.random.default_rng(0).integers(0, KINDS, batch.tokens_BT.shape).astype(np.int32)
    targets_BT = (tokens_BT + np.roll(tokens_BT, 1, axis=1)) % KINDS
    put = functools.partial(jax.device_put, device=batch.tokens_BT.sharding)
    batch = dataclasses.replace(batch, tokens_BT=put(tokens_BT), targets_BT=put(targets_BT))
    k = c.model.depth_ratio

    def activations(params):
        model = nnx.merge(graph(c), params)
        angles = rotary_angles(jnp.arange(TOKENS)[None], c.model.d_head, c.model.rope_theta)

        def layer(x_BTD, block_and_depth):
            block, depth = block_and_depth
            attention_BTD = block.attention(block.attention_norm(x_BTD), angles, depth, None)[0]
            mlp_BTD = block.mlp(block.mlp_norm(x_BTD + attention_BTD / k))
            x_BTD = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, depth, None))[0]
            return x_BTD, {"attention": attention_BTD, "mlp": mlp_BTD, "residual": x_BTD}

        x_BTD = model.embedding_VD[...].at[batch.tokens_BT].get(out_sharding=model.layout.act_BTD)
        x_BTD, found = jax.lax.scan(layer, x_BTD, (model.blocks, depth_schedule(c.model)))
        return found | {"residual": x_BTD, "logits": model.logits(model.final_norm(x_BTD))[..., :KINDS]}

    @jax.jit
    def run(seed):
        first = nnx.to_pure_dict(nnx.state(Decoder(c.model, rngs=nnx.Rngs(jax.random.key(seed)))))
        step = make_train_step(c)
        state = dataclasses.replace(init_state(c), params=first)
        state = jax.lax.fori_loop(0, updates, lambda _, state: step(state, batch)[0], state)
        found = activations(state.params)
        found["logits"] -= activations(first)["logits"]
        return jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x**2)), found)

    with jax.set_mesh(mesh):
        by_seed = [jax.device_get(run(seed)) for seed in range(seeds)]
    return {name: float(np.mean([found[name] for found in by_seed])) for name in by_seed[0]}
