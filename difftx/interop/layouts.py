"""Correspondence between the tensors of other formats and difftx's parameters, with the order of their axes."""
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
    """A parameter in another format and in difftx.

    Several tensors of the other format form a stack in difftx. In strings of axes, letters without a space between them
    form one axis of an array.
    """

    names: tuple[str, ...]  # Names in the other format, where {layer} stands for the layer's number.
    axes: str  # Axes in the other format.
    ours: str  # Path in difftx. Arrays below "blocks/" have a leading axis of layers.
    our_axes: str  # Axes in difftx, without those of layers and of the stack.

    @property
    def is_stacked(self) -> bool:
        """Return whether difftx's parameter holds all layers."""
        return self.ours.startswith("blocks/")


OUTPUT = "blocks/attention/output_HED"
GAIN = "blocks/attention/head_norm/scale"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers.{layer}."


def _attention(*rows: tuple[str, str, str, str]) -> list[Weight]:
    return [Weight((f"{_LAYER}self_attn.{a}",), b, f"blocks/attention/{c}", d) for a, b, c, d in rows]


_LAMBDAS = [
    Weight(
        tuple(f"{_LAYER}self_attn.lambda_{letter}{group}" for group in (1, 2)),
        "d",
        f"blocks/attention/lambda_{word}_Gd",
        "d",
    )
    for letter, word in (("q", "query"), ("k", "key"))
]
# Hugging Face stores the groups as two halves of the heads. The official code stores them next to each other in each
# head, and its rotary embedding rotates neighbouring channels, which are d / 2 apart in difftx.
_ATTENTION: dict[tuple[Format, str], list[Weight]] = {
    ("hf", "diff"): _attention(
        ("q_proj.weight", "GHd D", "query_DHGd", "D H G d"),
        ("k_proj.weight", "GKd D", "key_DKGd", "D K G d"),
        ("v_proj.weight", "GKd D", "value_DKE", "D K Gd"),
        ("o_proj.weight", "D HGd", "output_HED", "H Gd D"),
    )
    + _LAMBDAS,
    ("official", "diff"): _attention(
        ("q_proj.weight", "HGjp D", "query_DHGd", "D H G pj"),
        ("k_proj.weight", "KGjp D", "key_DKGd", "D K G pj"),
        ("v_proj.weight", "KGd D", "value_DKE", "D K Gd"),
        ("out_proj.weight", "D HGd", "output_HED", "H Gd D"),
        ("subln.weight", "Gd", "head_norm/scale", "Gd"),
    )
    + _LAMBDAS,
    ("hf", "transformer"): _attention(
        ("q_proj.weight", "Hd D", "query_DHd", "D H d"),
        ("k_proj.weight", "Kd D", "key_DKd", "D K d"),
        ("v_proj.weight", "Kd D", "value_DKd", "D K d"),
        ("o_proj.weight", "D Hd", "output_HdD", "H d D"),
    ),
    ("official", "transformer"): _attention(
        ("q_proj.weight", "Hjp D", "query_DHd", "D H pj"),
        ("k_proj.weight", "Kjp D", "key_DKd", "D K pj"),
        ("v_proj.weight", "Kd D", "value_DKd", "D K d"),
        ("out_proj.weight", "D Hd", "output_HdD", "H d D"),
    ),
}


def weights_of(format_: Format, model: ModelConfig) -> list[Weight]:
    """Return every parameter of a model in a format. Outside of attention, both formats use Llama's names."""
    weights = [
        Weight((EMBEDDING,), "V D", "embedding_VD", "V D"),
        *_ATTENTION[format_, model.architecture],
        Weight((f"{_LAYER}mlp.gate_proj.weight",), "F D", "blocks/mlp/gate_DF", "D F"),
        Weight((f"{_LAYER}mlp.up_proj.weight",), "F D", "blocks/mlp/up_DF", "D F"),
        Weight((f"{_LAYER}mlp.down_proj.weight",), "D F", "blocks/mlp/down_FD", "F D"),
        Weight((f"{_LAYER}input_layernorm.weight",), "D", "blocks/attention_norm/scale", "D"),
        Weight((f"{_LAYER}post_attention_layernorm.weight",), "D", "blocks/mlp_norm/scale", "D"),
        Weight(("model.norm.weight",), "D", "final_norm/scale", "D"),
    ]
    if not model.tie_embeddings:
        weights.append(Weight((UNEMBEDDING,), "V D", "unembedding_VD", "V D"))
    return weights


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the length of each axis."""
    d = model.d_head
    sizes = {"D": model.d_model, "V": model.vocab_size, "F": model.mlp_dim, "H": model.num_heads, "K": model.kv_heads}
    return sizes | {"G": 2, "d": d, "p": 2, "j": d // 2}


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array with the given axes."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in axes.split())


def rearrange(array: np.ndarray, axes: str, new_axes: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the array with its axes split into letters, put in the new order and merged."""
    letters, new_letters = axes.replace(" ", ""), new_axes.replace(" ", "")
    apart = array.reshape([sizes[letter] for letter in letters])
    return apart.transpose([letters.index(letter) for letter in new_letters]).reshape(shape_of(new_axes, sizes))
