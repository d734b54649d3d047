import jax
import numpy as np
import pytest
from flax import nnx

from difftx.errors import UserError
from difftx.inference.generate import generate
from difftx.training.state import graph, init_state

PROMPTS = [[5, 6, 7], [100], [9] * 10]


def setup(config, mesh, architecture):
    c = config(architecture, model__init="normal", model__init_std=0.3)  # Far from uniform.
    with jax.set_mesh(mesh):
        return c, jax.jit(lambda: init_state(c))().params


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 2}, {"context": 2, "fsdp": 2}])
@pytest.mark.parametrize("architecture", ["diff", "transformer"])
def test_greedy_equals_a_plain_loop(config, mesh_of, architecture, sizes):
    mesh = mesh_of(**sizes)
    c, params = setup(config, mesh, architecture)
    options = {"new_tokens": 8, "temperature": 0.0, "seed": 0, "vocab_size": 257}
    actual = generate(c, mesh, params, PROMPTS, **options)
    one = mesh_of()
    with jax.set_mesh(one):
        local = jax.device_put(jax.device_get(params), jax.NamedSharding(one, jax.P()))
        model = nnx.merge(graph(c), local)
        for prompt, completion in zip(PROMPTS, actual, strict=True):
            tokens = list(prompt)
            for _ in range(8):
                tokens.append(int(np.argmax(model(np.asarray([tokens], np.int32))[0][0, -1, :257])))
            assert tokens[len(prompt) :] == completion


def test_samples_follow_the_seed_and_the_vocabulary(config, mesh_of):
    mesh = mesh_of()
    c, params = setup(config, mesh, "diff")
    options = {"new_tokens": 20, "temperature": 5.0, "vocab_size": 50}
    first, again, other = (generate(c, mesh, params, PROMPTS, seed=s, **options) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert max(max(row) for row in first) < 50
    assert len(set(first[0])) > 5


def test_prompts_must_fit(config, mesh_of):
    mesh = mesh_of()
    c, params = setup(config, mesh, "diff")
    for prompt in ([], [1] * 30):
        with pytest.raises(UserError, match=f"a prompt of {len(prompt)} tokens and 8 new ones"):
            generate(c, mesh, params, [prompt], new_tokens=8, temperature=0.0, seed=0, vocab_size=257)
