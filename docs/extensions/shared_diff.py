"""Shared DIFF attention, from the abstract of arXiv 2501.17900 and recollection."""
#   B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = 2 groups, r = rank,
#   d = width of a sub-head

import dataclasses

from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.model.attention import DiffAttention
from difftx.model.layers import linear, projection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedDiffConfig:
    """Architecture shared_diff."""

    rank: int = 8
    """Rank of the difference between a group's projection and the shared one."""


@ARCHITECTURES.register("shared_diff")
class SharedDiffAttention(DiffAttention):
    """Differential attention with W_Qg = W_Q + U_g V_gᵀ and W_Kg = W_K + U'_g V'_gᵀ for the groups g = 1, 2."""

    own_config = SharedDiffConfig

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        del self.query_DHGd, self.key_DKGd
        D, r, d = config.d_model, config.own.rank, heads_of(config).d_head
        for name, heads in (("query", config.num_heads), ("key", heads_of(config).kv_heads)):
            shapes = {
                f"{name}_DHd": ((D, heads, d), layout.value_DKE),
                f"{name}_down_DGr": ((D, 2, r), layout.spec("fsdp", None, None)),
                f"{name}_up_rGHd": ((r, 2, heads, d), layout.spec(None, None, "tensor", None)),
            }
            for weight, (shape, spec) in shapes.items():
                setattr(self, weight, projection(config, shape, 1, spec, rngs=rngs))

    def project(self, x_BTD, angles):
        v_BTKE = linear("BTD,DKE->BTKE", x_BTD, self.value_DKE, self.layout.act_BTHE)
        return *self.rotated(self.groups_of(x_BTD, "query"), self.groups_of(x_BTD, "key"), angles), v_BTKE

    def groups_of(self, x_BTD, name):
        shared, down, up = (getattr(self, f"{name}_{axes}") for axes in ("DHd", "down_DGr", "up_rGHd"))
        low_BTGr = linear("BTD,DGr->BTGr", x_BTD, down, self.layout.spec(*self.layout.act_BTD, None))
        own_BTHGd = linear("BTGr,rGHd->BTHGd", low_BTGr, up, self.layout.act_BTHGd)
        return linear("BTD,DHd->BTHd", x_BTD, shared, self.layout.act_BTHE)[:, :, :, None] + own_BTHGd
