"""How every array of the model is cut over the mesh, in one place.

B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = query/key groups of a head (A1 and A2),
d = width of a (sub-)head, E = width of a value head, F = hidden width of the MLP, V = vocabulary.
"""

import dataclasses

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
    mlp_in_DF: P = P("fsdp", "tensor")
    mlp_out_FD: P = P("tensor", "fsdp")
    vector: P = P()  # Norm gains and λ vectors: a few kilobytes, on every device.

    act_BT: P = P(BATCH, None)
    act_BTD: P = P(BATCH, None, None)
    act_BTHGd: P = P(BATCH, None, "tensor", None, None)
    act_BTHE: P = P(BATCH, None, "tensor", None)
    act_BTF: P = P(BATCH, None, "tensor")
    logits_BTV: P = P(BATCH, None, "tensor")
