"""The sharding of all arrays of the model over the mesh."""
# Axes: B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = 2 groups (A1, A2),
#   d = width of a (sub-)head, E = width of a value head, F = hidden width of the MLP, V = vocabulary, L = layers

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax import P

BATCH = ("data", "fsdp")


class Inferred(jax.NamedSharding):
    """A sharding that JAX infers, in place of a PartitionSpec. Its axes are None, and a slice of it is one too."""

    def __init__(self):
        super().__init__(jax.sharding.AbstractMesh((), ()), P())

    def __getitem__(self, index: int | slice) -> "Inferred | None":
        return self if isinstance(index, slice) else None

    def __iter__(self) -> Iterator[None]:
        return iter(())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """PartitionSpecs of the weights of one layer, and of activations. Stacked layers have a leading, unsharded axis."""

    embedding_VD: P = P("tensor", "fsdp")
    query_DHGd: P = P("fsdp", "tensor", None, None)
    key_DKGd: P = P("fsdp", "tensor", None, None)
    value_DKE: P = P("fsdp", "tensor", None)
    output_HED: P = P("tensor", None, "fsdp")
    lambda_DH: P = P("fsdp", "tensor")  # Projection to the λ of each token and head in `DiffAttentionV2`.
    mlp_in_DF: P = P("fsdp", "tensor")
    mlp_out_FD: P = P("tensor", "fsdp")
    vector: P = P()  # Norm gains, λ vectors and sinks have a few kilobytes, so they are replicated.

    # Tokens and their embeddings in the lookup. Each device looks up tokens in its own columns of the embedding and
    # exchanges the results. Gathering the columns would send far more bytes, in the forward and in the backward pass.
    lookup_BT: P = P("data", "context")
    lookup_BTD: P = P("data", "context", "fsdp")

    act_BT: P = P(BATCH, "context")
    act_BTD: P = P(BATCH, "context", None)
    act_BTHGd: P = P(BATCH, "context", "tensor", None, None)
    act_BTHE: P = P(BATCH, "context", "tensor", None)
    act_BTH: P = P(BATCH, "context", "tensor")
    act_BTF: P = P(BATCH, "context", "tensor")
    logits_BTV: P = P(BATCH, None, "tensor")  # Logits in inference. The training loss computes logits in chunks.

    # Queries, keys, values and the key/value cache, as attention expects them. `Layout.of` explains the choices.
    attend_BTHGd: P = P(BATCH, None, ("tensor", "context"), None, None)
    attend_BTHE: P = P(BATCH, None, ("tensor", "context"), None)
    cache_LBK: P = P(None, BATCH, ("tensor", "context"))
    zigzag: bool = False  # Whether tokens are in zig-zag order between the embedding and the last norm.

    @classmethod
    def of(cls, context_method: Literal["heads", "gather", "zigzag"]) -> "Layout":
        """Return the layout for training. `mesh.context_method` selects how attention communicates along `context`.

        With "heads" (DeepSpeed Ulysses, arXiv 2309.14509), each device attends to whole rows with a share of the heads.
        With "gather" and "zigzag", each device keeps its queries and gathers the keys and values of whole rows, as
        `kernels/context.py` explains. docs/design.md compares the times of a step.
        """
        if context_method == "heads":
            return cls()
        sharded = {"attend_BTHGd": cls.act_BTHGd, "attend_BTHE": cls.act_BTHE, "cache_LBK": P(None, BATCH, "tensor")}
        return cls(**sharded, zigzag=context_method == "zigzag")

    @classmethod
    def inferred(cls) -> "Layout":
        """Return a layout with which JAX infers each sharding from the operands.

        It serves code without a mesh, and code under a mesh whose axes are not those of difftx.
        """
        inferred: dict[str, Any] = {field.name: Inferred() for field in dataclasses.fields(cls) if field.type is P}
        return cls(**inferred)

    def spec(self, *axes: Any) -> P:
        """Return `P(*axes)`, or `Inferred()` if that is what the layout has. `axes` may be parts of the layout."""
        return self.vector if isinstance(self.vector, Inferred) else P(*axes)

    def with_whole_rows(self) -> "Layout":
        """Return a layout in which attention does not shard rows along their tokens, as `attention_rows` requires."""
        if self.attend_BTHE[1] is None:
            return self
        # Devices along `context` repeat the same work, because `context` need not divide the number of heads.
        whole = {"attend_BTHGd": P(BATCH, None, "tensor", None, None), "attend_BTHE": P(BATCH, None, "tensor", None)}
        return dataclasses.replace(self, **whole, zigzag=False)

    def for_inference(self) -> "Layout":
        """Return the layout for inference. `context` shards no tokens. It shards heads if it does so in training."""
        whole = self.with_whole_rows()
        unsharded: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.type is P:
                spec = getattr(whole, field.name)
                unsharded[field.name] = P(*(None if axis == "context" else axis for axis in spec))
        return dataclasses.replace(whole, **unsharded)


def reshard(x: jax.Array, spec: P) -> jax.Array:
    """Return `jax.sharding.reshard(x, spec)`, or `x` for a spec of `Layout.inferred`."""
    return x if isinstance(spec, Inferred) else jax.sharding.reshard(x, spec)
