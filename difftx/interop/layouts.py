"""Names and axes of the tensors of other formats, and the parameters of difftx that hold their values."""
#   D = model width, V = vocabulary, F = hidden width of the MLP, H = heads, K = key/value heads, G = 2 groups (A1 and
#   A2), d = width of a query/key (sub-)head, p = 2 channels that the rotary embedding rotates together, j = d / 2 pairs

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from difftx.config import ModelConfig

Format = Literal["hf", "official"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of difftx, and the tensors of another format with the same values.

    Axes are written as one word of letters per axis. An axis of several letters combines them, the last one fastest:
    "HGd D" describes a matrix with H·G·d rows and D columns.
    """

    names: tuple[str, ...]  # Tensors of the other format; difftx stacks several. {layer} stands for the layer's number.
    axes: str  # Axes of each tensor.
    path: str  # Path of the parameter. A parameter below "blocks/" has a leading axis of layers.
    our_axes: str  # Axes of the parameter, without the axes of layers and of stacked tensors.

    @property
    def has_layers(self) -> bool:
        return self.path.startswith("blocks/")


OUTPUT = "blocks/attention/output_HED"
GAIN = "blocks/attention/head_norm/scale"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"


def _layer(name: str | tuple[str, ...], axes: str, path: str, our_axes: str) -> Weight:
    names = (name,) if isinstance(name, str) else name
    return Weight(tuple(f"model.layers.{{layer}}.{name}" for name in names), axes, f"blocks/{path}", our_axes)


_LAMBDAS = [
    _layer(("self_attn.lambda_q1", "self_attn.lambda_q2"), "d", "attention/lambda_query_Gd", "d"),
    _layer(("self_attn.lambda_k1", "self_attn.lambda_k2"), "d", "attention/lambda_key_Gd", "d"),
]
# In Hugging Face's format, each group is one half of the heads. In the official code, each head contains both groups,
# and the rotary embedding rotates neighbouring channels, which are d / 2 apart in difftx.
_ATTENTION: dict[tuple[Format, str], list[Weight]] = {
    ("hf", "diff"): [
        _layer("self_attn.q_proj.weight", "GHd D", "attention/query_DHGd", "D H G d"),
        _layer("self_attn.k_proj.weight", "GKd D", "attention/key_DKGd", "D K G d"),
        _layer("self_attn.v_proj.weight", "GKd D", "attention/value_DKE", "D K Gd"),
        _layer("self_attn.o_proj.weight", "D HGd", "attention/output_HED", "H Gd D"),
        *_LAMBDAS,
    ],
    ("official", "diff"): [
        _layer("self_attn.q_proj.weight", "HGjp D", "attention/query_DHGd", "D H G pj"),
        _layer("self_attn.k_proj.weight", "KGjp D", "attention/key_DKGd", "D K G pj"),
        _layer("self_attn.v_proj.weight", "KGd D", "attention/value_DKE", "D K Gd"),
        _layer("self_attn.out_proj.weight", "D HGd", "attention/output_HED", "H Gd D"),
        _layer("self_attn.subln.weight", "Gd", "attention/head_norm/scale", "Gd"),
        *_LAMBDAS,
    ],
    ("hf", "transformer"): [
        _layer("self_attn.q_proj.weight", "Hd D", "attention/query_DHd", "D H d"),
        _layer("self_attn.k_proj.weight", "Kd D", "attention/key_DKd", "D K d"),
        _layer("self_attn.v_proj.weight", "Kd D", "attention/value_DKd", "D K d"),
        _layer("self_attn.o_proj.weight", "D Hd", "attention/output_HdD", "H d D"),
    ],
    ("official", "transformer"): [
        _layer("self_attn.q_proj.weight", "Hjp D", "attention/query_DHd", "D H pj"),
        _layer("self_attn.k_proj.weight", "Kjp D", "attention/key_DKd", "D K pj"),
        _layer("self_attn.v_proj.weight", "Kd D", "attention/value_DKd", "D K d"),
        _layer("self_attn.out_proj.weight", "D Hd", "attention/output_HdD", "H d D"),
    ],
}


def weights_of(format_: Format, model: ModelConfig) -> list[Weight]:
    """Return the weights of a model. Except in attention layers, both formats use Llama's names."""
    weights = [
        Weight((EMBEDDING,), "V D", "embedding_VD", "V D"),
        *_ATTENTION[format_, model.architecture],
        _layer("mlp.gate_proj.weight", "F D", "mlp/gate_DF", "D F"),
        _layer("mlp.up_proj.weight", "F D", "mlp/up_DF", "D F"),
        _layer("mlp.down_proj.weight", "D F", "mlp/down_FD", "F D"),
        _layer("input_layernorm.weight", "D", "attention_norm/scale", "D"),
        _layer("post_attention_layernorm.weight", "D", "mlp_norm/scale", "D"),
        Weight(("model.norm.weight",), "D", "final_norm/scale", "D"),
    ]
    if not model.tie_embeddings:
        weights.append(Weight((UNEMBEDDING,), "V D", "unembedding_VD", "V D"))
    return weights


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of each letter."""
    d = model.d_head
    sizes = {"D": model.d_model, "V": model.vocab_size, "F": model.mlp_dim, "H": model.num_heads, "K": model.kv_heads}
    return sizes | {"G": 2, "d": d, "p": 2, "j": d // 2}


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array with the given axes."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in axes.split())


def rearrange(array: np.ndarray, axes: str, new_axes: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return an array with axes `axes` as an array with axes `new_axes`, which consist of the same letters."""
    letters, new_letters = axes.replace(" ", ""), new_axes.replace(" ", "")
    split = array.reshape([sizes[letter] for letter in letters])
    return split.transpose([letters.index(letter) for letter in new_letters]).reshape(shape_of(new_axes, sizes))
