"""Comparisons of an imported run with the results of transformers."""

import numpy as np

import difftx
from difftx.data.tokenizers import load_tokenizer
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.interop.runs import our_logits
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config
from helpers.interop_folders import parameters


def check_logits(workdir, theirs, mesh):
    ours = our_logits(read_manifest(workdir / "checkpoints" / "0"), read_config(workdir), mesh, theirs["tokens"])
    np.testing.assert_allclose(ours, theirs["logits"], rtol=0, atol=1e-5)


def check_attention_weights(workdir, theirs):
    """DiffLlama returns the weights of A1 as those of the first half of the heads, and A2 as the second half."""
    run = difftx.load(workdir)
    for layer, weights in enumerate(theirs["attentions"], start=1):
        ours = run.attention(theirs["tokens"][0].tolist(), layer=layer)
        np.testing.assert_allclose([ours.a1, ours.a2], np.split(weights, 2), rtol=0, atol=1e-5)


def check_generation(workdir, theirs, mesh):
    config, params = parameters(workdir, mesh)
    lm = LanguageModel(config, mesh, params, load_tokenizer("bytes"))
    request = Request(prompt=theirs["tokens"][0].tolist(), new_tokens=64, seed=0)
    assert generate(lm, [request], GREEDY)[0].tokens == theirs["generated"].tolist()
