"""Comparisons of an imported run with the results of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.data.tokenizers import load_tokenizer
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.interop.runs import our_logits
from difftx.model.architectures import heads_of
from difftx.model.attention import layer_constants
from difftx.model.decoder import Block
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config
from helpers.interop_folders import parameters


def check_logits(workdir, theirs, mesh):
    ours = our_logits(read_manifest(workdir / "checkpoints" / "0"), read_config(workdir), mesh, theirs["tokens"])
    np.testing.assert_allclose(ours, theirs["logits"], rtol=0, atol=1e-5)


def check_attention_weights(workdir, theirs, mesh):
    config, params = parameters(workdir, mesh)
    model = config.model
    with jax.set_mesh(mesh):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Block(model, Layout(), rngs=nnx.Rngs(0))))
        angles = rotary_angles(jnp.arange(theirs["tokens"].shape[1])[None], model)
        x_BTD = params["embedding_VD"].at[theirs["tokens"]].get(out_sharding=jax.P())

        @jax.jit
        def step(params, constants, x_BTD):
            block = nnx.merge(graphdef, params)
            q_BTHGd, k_BTKGd, _ = block.attention.project(block.attention_norm(x_BTD), angles)
            x_BTD, _ = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, constants, None))
            return q_BTHGd[0], k_BTKGd[0], x_BTD

        for layer in range(model.num_layers):
            of_layer = jax.tree.map(lambda a, layer=layer: a[layer], (params["blocks"], layer_constants(model)))
            q_THGd, k_TKGd, x_BTD = step(*of_layer, x_BTD)
            k_THGd = np.repeat(np.asarray(k_TKGd), model.num_heads // heads_of(model).kv_heads, axis=1)
            scores_GHTS = np.einsum("thgd,shgd->ghts", q_THGd, k_THGd) / np.sqrt(heads_of(model).d_head)
            scores_GHTS[..., ~np.tri(scores_GHTS.shape[-1], dtype=bool)] = -np.inf
            exp_GHTS = np.exp(scores_GHTS)
            weights_GHTS = exp_GHTS / exp_GHTS.sum(axis=-1, keepdims=True)
            halves = np.split(theirs["attentions"][layer], 2)
            np.testing.assert_allclose(weights_GHTS, halves, rtol=0, atol=1e-5)


def check_generation(workdir, theirs, mesh):
    config, params = parameters(workdir, mesh)
    lm = LanguageModel(config, mesh, params, load_tokenizer("bytes"))
    request = Request(prompt=theirs["tokens"][0].tolist(), new_tokens=64, seed=0)
    assert generate(lm, [request], GREEDY)[0].tokens == theirs["generated"].tolist()
