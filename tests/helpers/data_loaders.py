"""Loaders of small batches on a mesh of the tests."""

import types

import jax

from difftx.data.loader import Loader
from difftx.parallel.layout import Layout


def sharding_on(mesh):
    return jax.NamedSharding(mesh, Layout().act_BT)


def loader_of(examples, mesh, *, rows=4, signature=None, vocab_size=264, where=str):
    train = {"memory": types.SimpleNamespace(threads=1)}
    sources = types.SimpleNamespace(examples=examples, signature=signature or {}, where=where, train=train)
    return Loader(sources, batch_rows=rows, prefetch_batches=1, sharding=sharding_on(mesh), vocab_size=vocab_size)
