"""How every array of the model is cut over the mesh, in one place.

B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = query/key groups of a head (A1 and A2),
d = width of a (sub-)head, E = width of a value head, F = hidden width of the MLP, V = vocabulary.
"""

import dataclasses
from typing import Literal

from jax import P

BATCH = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """PartitionSpecs of weights (one layer's; the scan adds a leading, uncut axis) and activations."""

    embedding_VD: P = P("tensor", "fsdp")
    query_DHGd: P = P("fsdp", "tensor", None, None)
    key_DKGd: P = P("fsdp", "tensor", None, None)
    value_DKE: P = P("fsdp", "tensor", None)
    output_HED: P = P("tensor", None, "fsdp")
    lambda_DH: P = P("fsdp", "tensor")  # V2's λ of each token and head.
    mlp_in_DF: P = P("fsdp", "tensor")
    mlp_out_FD: P = P("tensor", "fsdp")
    vector: P = P()  # Norm gains, λ vectors, sinks: a few kilobytes, on every device.

    # Tokens travel to the columns of the embedding, not its columns to the tokens: far fewer bytes, forward and back.
    lookup_BT: P = P("data", "context")
    lookup_BTD: P = P("data", "context", "fsdp")

    act_BT: P = P(BATCH, "context")
    act_BTD: P = P(BATCH, "context", None)
    act_BTHGd: P = P(BATCH, "context", "tensor", None, None)
    act_BTHE: P = P(BATCH, "context", "tensor", None)
    act_BTH: P = P(BATCH, "context", "tensor")
    act_BTF: P = P(BATCH, "context", "tensor")
    logits_BTV: P = P(BATCH, None, "tensor")  # Of few tokens: a loss has its own, in chunks.

    # In attention each device holds whole rows of a share of the heads: tokens are exchanged for heads over `context`
    # (DeepSpeed Ulysses, arXiv 2309.14509), so that kernels, masks and load balance stay those of one device. Or rows
    # stay cut, and keys and values are gathered (`kernels/context.py`): see `Layout.of`.
    attend_BTHGd: P = P(BATCH, None, ("tensor", "context"), None, None)
    attend_BTHE: P = P(BATCH, None, ("tensor", "context"), None)
    zigzag: bool = False  # Between embedding and last norm tokens stand in zig-zag order.

    # A layer's cached keys [L, B, K, …] and values: rows and heads as in attention.
    cache_LBK: P = P(None, BATCH, ("tensor", "context"))

    @classmethod
    def of(cls, context_method: Literal["heads", "gather", "zigzag"]) -> "Layout":
        """Return the layout to train in: how attention crosses `context`, a field of the config."""
        if context_method == "heads":
            return cls()
        rows_cut = {"attend_BTHGd": cls.act_BTHGd, "attend_BTHE": cls.act_BTHE, "cache_LBK": P(None, BATCH, "tensor")}
        return cls(**rows_cut, zigzag=context_method == "zigzag")

    def with_whole_rows(self) -> "Layout":
        """Return a layout where each device attends whole rows of its heads, as those who look at maps must."""
        if self.attend_BTHE[1] is None:
            return self
        # Heads need not divide by `context`: its devices all do the same.
        whole = {"attend_BTHGd": P(BATCH, None, "tensor", None, None), "attend_BTHE": P(BATCH, None, "tensor", None)}
        return dataclasses.replace(self, **whole, zigzag=False)

    def for_inference(self) -> "Layout":
        """Return a layout for tokens that come one by one or in small chunks: `context` cuts at most heads."""
        return dataclasses.replace(
            self.with_whole_rows(),
            lookup_BT=P("data", None),
            lookup_BTD=P("data", None, "fsdp"),
            act_BT=P(BATCH, None),
            act_BTD=P(BATCH, None, None),
            act_BTHGd=P(BATCH, None, "tensor", None, None),
            act_BTHE=P(BATCH, None, "tensor", None),
            act_BTH=P(BATCH, None, "tensor"),
            act_BTF=P(BATCH, None, "tensor"),
        )
