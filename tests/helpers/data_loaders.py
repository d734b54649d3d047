"""Loaders of small batches on a mesh of the tests."""

import jax

from difftx.data.loader import Loader
from difftx.parallel.layout import Layout


def sharding_on(mesh):
    return jax.NamedSharding(mesh, Layout().act_BT)


def loader_of(examples, mesh, *, rows=4, signature=None, vocab_size=264, where=str):
    options = {"prefetch_batches": 1, "signature": signature or {}, "vocab_size": vocab_size, "where": where}
    return Loader(examples, batch_rows=rows, sharding=sharding_on(mesh), **options)
