"""The sharding of all arrays of the model over the mesh."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = query/key groups of a head (A1 and A2),
#   d = width of a (sub-)head, E = width of a value head, F = hidden width of the MLP, V = vocabulary, L = layers

import dataclasses
from typing import Any, Literal

from jax import P

BATCH = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """PartitionSpecs of one layer's weights and of activations. The scan over layers adds a leading, unsharded axis."""

    embedding_VD: P = P("tensor", "fsdp")
    query_DHGd: P = P("fsdp", "tensor", None, None)
    key_DKGd: P = P("fsdp", "tensor", None, None)
    value_DKE: P = P("fsdp", "tensor", None)
    output_HED: P = P("tensor", None, "fsdp")
    lambda_DH: P = P("fsdp", "tensor")  # Projection to V2's λ of each token and head.
    mlp_in_DF: P = P("fsdp", "tensor")
    mlp_out_FD: P = P("tensor", "fsdp")
    vector: P = P()  # Norm gains, λ vectors and sinks: a few kilobytes, replicated.

    # Each device looks up tokens in its own columns of the embedding and exchanges the results. Gathering the columns
    # would send far more bytes, in the forward and in the backward pass.
    lookup_BT: P = P("data", "context")
    lookup_BTD: P = P("data", "context", "fsdp")

    act_BT: P = P(BATCH, "context")
    act_BTD: P = P(BATCH, "context", None)
    act_BTHGd: P = P(BATCH, "context", "tensor", None, None)
    act_BTHE: P = P(BATCH, "context", "tensor", None)
    act_BTH: P = P(BATCH, "context", "tensor")
    act_BTF: P = P(BATCH, "context", "tensor")
    logits_BTV: P = P(BATCH, None, "tensor")  # Logits of a few tokens; a loss computes its own in chunks.

    # Operands of attention, and its cache: see `Layout.of`.
    attend_BTHGd: P = P(BATCH, None, ("tensor", "context"), None, None)
    attend_BTHE: P = P(BATCH, None, ("tensor", "context"), None)
    cache_LBK: P = P(None, BATCH, ("tensor", "context"))
    zigzag: bool = False  # Between the embedding and the last norm, tokens are in zig-zag order.

    @classmethod
    def of(cls, context_method: Literal["heads", "gather", "zigzag"]) -> "Layout":
        """Return the layout for training. `mesh.context_method` selects how attention communicates along `context`.

        With "heads" (DeepSpeed Ulysses, arXiv 2309.14509), each device attends to whole rows with a share of the heads.
        With "gather" and "zigzag", each device keeps its queries and gathers the keys and values of whole rows, see
        `kernels/context.py`. Compiled for 64 v5p (3B, 64K tokens, 4 devices along `context`), a step has 12.7 s of
        arithmetic and 0.49 s of communication with "zigzag", 14.2 s and 0.32 s with "heads", and 19.2 s of arithmetic
        on the last device with "gather".
        """
        if context_method == "heads":
            return cls()
        sharded = {"attend_BTHGd": cls.act_BTHGd, "attend_BTHE": cls.act_BTHE, "cache_LBK": P(None, BATCH, "tensor")}
        return cls(**sharded, zigzag=context_method == "zigzag")

    def with_whole_rows(self) -> "Layout":
        """Return a layout with whole rows on each device in attention, as required to read attention weights."""
        if self.attend_BTHE[1] is None:
            return self
        # Devices along `context` repeat the same work, because `context` need not divide the number of heads.
        whole = {"attend_BTHGd": P(BATCH, None, "tensor", None, None), "attend_BTHE": P(BATCH, None, "tensor", None)}
        return dataclasses.replace(self, **whole, zigzag=False)

    def for_inference(self) -> "Layout":
        """Return the layout for inference: `context` shards no tokens, and heads only if it does so in training."""
        whole = self.with_whole_rows()
        unsharded: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.type is P:
                spec = getattr(whole, field.name)
                unsharded[field.name] = P(*(None if axis == "context" else axis for axis in spec))
        return dataclasses.replace(whole, **unsharded)
