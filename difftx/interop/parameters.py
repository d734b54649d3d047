"""Convert parameters between the layouts of difftx and of other formats, one layer at a time.

Values stay bit-identical, except that DiffLlama requires the gain of the head norm to be folded into W_O.
"""
# Axes in names and strings: D = model width, V = vocabulary, F = hidden width of the MLP, L = layers, H = heads,
# K = key/value heads, G = 2 groups (of the attention weights A1 and A2), d = width of a head's query and key in a
# group, E = width of a head's output, p = 2 channels that the rotary embedding rotates together, j = d / 2 such pairs,
# A = queries per token, N = noise heads, Q = A / N, R = H / K, c = 3 coefficients of PolyNorm, o = 1 (an axis that only
# one of the layouts has)

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from difftx.config import ModelConfig
from difftx.errors import UserError, did_you_mean
from difftx.interop.safetensors import Tensor
from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.model.lora import LORA
from difftx.training.checkpoint.weights import ParamsReader, Streamed
from difftx.training.trainable import adapted_names

Format = Literal["hf", "diffllama", "official", "motif"]

OUTPUT = "blocks/attention/output_HED"
GAIN = "blocks/attention/head_norm/scale"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
BLOCK_BYTES = 2**26  # Convert embeddings in blocks of rows of about this size.


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of difftx and the tensors in another format that hold its values.

    A string of axes has one word per axis. A word of several letters is one axis that combines these dimensions in
    row-major order: "HGd D" is a matrix with H·G·d rows, in which the index over d changes fastest, and D columns.
    """

    names: tuple[str, ...]  # Names of the tensors, with {layer} for the layer's number. Several tensors are stacked.
    axes: str  # Axes of each tensor.
    path: str  # Path of the parameter in difftx. Parameters below "blocks/" have a leading layer axis.
    our_axes: str  # Axes of the parameter in difftx, without the layer axis and the axis of stacked tensors.

    @property
    def has_layers(self) -> bool:
        return self.path.startswith("blocks/")


def _layer(name: str | tuple[str, ...], axes: str, path: str, our_axes: str) -> Weight:
    names = (name,) if isinstance(name, str) else name
    return Weight(tuple(f"model.layers.{{layer}}.{name}" for name in names), axes, f"blocks/{path}", our_axes)


_LAMBDAS = [
    _layer(("self_attn.lambda_q1", "self_attn.lambda_q2"), "d", "attention/lambda_query_Gd", "d"),
    _layer(("self_attn.lambda_k1", "self_attn.lambda_k2"), "d", "attention/lambda_key_Gd", "d"),
]
# For each `model.head_norm` with parameters: axes of `GAIN` in the files of `modeling_difftx.py`, and axes in difftx.
_HEAD_NORM = {"rms_affine": ("E", "E"), "scalar": ("o", ""), "sigmoid": ("H", "H o")}

# "hf" is the layout of Llama and of `modeling_difftx.py`. `SelfAttention.tensors` describes its attention weights.
# "motif" is like "hf" except for the name of the head norm. In DiffLlama, each group is one half of the heads. In the
# official code, each head contains both groups. Its rotary embedding rotates neighbouring channels, while difftx
# rotates channels at a distance of d / 2.
_ATTENTION: dict[tuple[Format, str], list[Weight]] = {
    ("diffllama", "diff"): [
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
    ("official", "transformer"): [
        _layer("self_attn.q_proj.weight", "Hjp D", "attention/query_DHd", "D H pj"),
        _layer("self_attn.k_proj.weight", "Kjp D", "attention/key_DKd", "D K pj"),
        _layer("self_attn.v_proj.weight", "Kd D", "attention/value_DKd", "D K d"),
        _layer("self_attn.out_proj.weight", "D Hd", "attention/output_HdD", "H d D"),
    ],
}


def architectures_of(format_: Format) -> list[str]:
    """Return the architectures that a format supports."""
    if format_ == "hf":
        return list(ARCHITECTURES.builtin)  # `modeling_difftx.py` supports all of them.
    return [architecture for of_format, architecture in _ATTENTION if of_format == format_]


def weights_of(format_: Format, model: ModelConfig) -> list[Weight]:
    """List the weights of a model in a format. All formats use Llama's names, except in attention layers."""
    architecture, is_own = ARCHITECTURES[model.architecture], format_ in ("hf", "motif")

    def layers(module: str, path: str, tensors: Mapping[str, tuple[str, str, str]]) -> list[Weight]:
        return [_layer(f"{module}.{name}", axes, f"{path}/{ours}", to) for name, (axes, ours, to) in tensors.items()]

    if is_own:
        attention = layers("self_attn", "attention", architecture.tensors(model))
    else:
        attention = _ATTENTION[format_, model.architecture]
    weights = [
        Weight((EMBEDDING,), "V D", "embedding_VD", "V D"),
        *attention,
        *layers("mlp", "mlp", architecture.mlp.tensors()),
        _layer("input_layernorm.weight", "D", "attention_norm/scale", "D"),
        _layer("post_attention_layernorm.weight", "D", "mlp_norm/scale", "D"),
        Weight(("model.norm.weight",), "D", "final_norm/scale", "D"),
    ]
    if model.attention_bias:
        weights += map(_bias, attention[:3])
    if is_own:
        if model.qk_norm:
            weights.append(_layer("self_attn.q_norm.weight", "d", "attention/query_norm/scale", "d"))
            weights.append(_layer("self_attn.k_norm.weight", "d", "attention/key_norm/scale", "d"))
        if "lambda_learned" in architecture.fields and model.lambda_learned:
            weights += _LAMBDAS
        if model.head_norm in _HEAD_NORM:
            axes, our_axes = _HEAD_NORM[model.head_norm]
            name = "subln" if format_ == "motif" else "head_norm"
            weights.append(_layer(f"self_attn.{name}.weight", axes, GAIN.removeprefix("blocks/"), our_axes))
    if not model.tie_embeddings:
        weights.append(Weight((UNEMBEDDING,), "V D", "unembedding_VD", "V D"))
    return weights


def _bias(weight: Weight) -> Weight:
    """Return the `Weight` of the bias that belongs to a query, key or value projection."""
    (name,) = weight.names
    path = f"{weight.path.partition('_D')[0]}_bias"
    axes, our_axes = weight.axes.removesuffix(" D"), weight.our_axes.removeprefix("D ")
    return Weight((name.replace(".weight", ".bias"),), axes, path, our_axes)


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of the dimension that each axis letter stands for."""
    heads = heads_of(model)
    d, noise_heads = heads.d_head, heads.query_heads - model.num_heads
    sizes = {"D": model.d_model, "V": model.embeddings, "F": model.mlp_dim, "H": model.num_heads, "K": heads.kv_heads}
    if noise_heads:
        sizes |= {"N": noise_heads, "Q": heads.query_heads // noise_heads}
    sizes |= {"A": heads.query_heads, "E": heads.d_value, "R": model.num_heads // heads.kv_heads}
    return sizes | {"G": 2, "d": d, "p": 2, "j": d // 2, "c": 3, "o": 1}


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array with the given axes."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in axes.split())


def rearrange(array: np.ndarray, axes: str, new_axes: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Transpose and reshape an array from `axes` to `new_axes`. Apart from "o", both must have the same letters."""
    letters, new_letters = (text.replace(" ", "").replace("o", "") for text in (axes, new_axes))
    split = array.reshape([sizes[letter] for letter in letters])
    return split.transpose([letters.index(letter) for letter in new_letters]).reshape(shape_of(new_axes, sizes))


def import_params(
    source: Path, tensors: Mapping[str, Tensor], format_: Format, model: ModelConfig
) -> dict[str, Streamed]:
    """Return difftx's parameters by path. Values are read from the files later, when a checkpoint is written."""
    sizes, weights = sizes_of(model), weights_of(format_, model)
    expected = set()
    for name, shape in ((n, shape_of(w.axes, sizes)) for w in weights for n in _names(w, model.num_layers)):
        if name not in tensors:
            raise UserError(f"{source}: no tensor {name}.{did_you_mean(name, tensors)}")
        if tensors[name].shape != shape:
            raise UserError(
                f"{tensors[name].file}: {name} has shape {tensors[name].shape}, but config.json implies {shape}"
            )
        expected.add(name)
    for name in tensors.keys() - expected:
        if name == UNEMBEDDING:  # The file of a tied model may contain a copy of the embedding.
            _require_equal(tensors[UNEMBEDDING], tensors[EMBEDDING])
        elif not name.endswith(".rotary_emb.inv_freq"):  # Ignore these, as `rope_theta` determines them.
            raise UserError(f"{tensors[name].file}: {name} does not belong to the model that config.json describes")
    return {weight.path: _import(weight, tensors, model.num_layers, sizes) for weight in weights}


def export_params(reader: ParamsReader, format_: Format, model: ModelConfig) -> dict[str, Streamed]:
    """Return the tensors of another format by name. Values are read from the checkpoint when they are written."""
    sizes, tensors = sizes_of(model), {}
    # The reader caches the chunks of one parameter only, and a chunk may hold all layers. Therefore list the tensors
    # parameter by parameter, and read the gain before the layers of W_O.
    is_folded = format_ == "diffllama" and model.head_norm == "rms_affine"
    gain_LE = reader.read(GAIN, slice(None)) if is_folded else None
    for weight in weights_of(format_, model):
        shape = shape_of(weight.axes, sizes)
        if not weight.has_layers:
            tensors[weight.names[0]] = by_rows(shape, partial(reader.read, weight.path))
            continue
        for layer in range(model.num_layers):
            for index, name in enumerate(weight.names):
                read = partial(_export_layer, reader, model, weight, gain_LE, layer, index)
                tensors[name.format(layer=layer)] = Streamed(shape, shape[0], lambda _, read=read: read())
    return tensors


def peft_tensors(reader: ParamsReader, model: ModelConfig, rank: int) -> tuple[dict[str, Streamed], list[str]]:
    """Return a checkpoint's adapters, named as in the package peft, and the names of the adapted modules."""
    sizes, tensors, modules = sizes_of(model) | {"r": rank}, {}, set()
    adapted = adapted_names(model)
    for weight in weights_of("hf", model):
        if weight.path not in adapted:
            continue
        # PyTorch's matrices are [outputs, inputs]. Ours have the input axes first.
        outputs, inputs = weight.axes.split()
        ours, count = weight.our_axes.split(), adapted[weight.path][0]
        ours_in, ours_out = " ".join(ours[:count]), " ".join(ours[count:])
        forms = {"A": ("a", f"{ours_in} r", f"r {inputs}"), "B": ("b", f"r {ours_out}", f"{outputs} r")}
        module = weight.names[0].removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        for form, (part, our_axes, axes) in forms.items():
            for layer in range(model.num_layers):

                def read(_, path=f"{LORA}/{weight.path}/{part}", layer=layer, our_axes=our_axes, axes=axes):
                    return rearrange(reader.stored(path, layer), our_axes, axes, sizes)

                name = f"base_model.model.{module.format(layer=layer)}.lora_{form}.weight"
                tensors[name] = Streamed(shape := shape_of(axes, sizes), shape[0], read)
    return tensors, sorted(modules)


def _names(weight: Weight, layers: int) -> Iterator[str]:
    return (name.format(layer=layer) for name in weight.names for layer in range(layers if weight.has_layers else 1))


def _require_equal(unembedding: Tensor, embedding: Tensor) -> None:
    blocks = by_rows(embedding.shape, embedding.read).parts()
    if unembedding.shape != embedding.shape or not all(
        np.array_equal(unembedding.read(rows), block) for rows, block in blocks
    ):
        raise UserError(
            f"{unembedding.file}: {UNEMBEDDING} differs from {EMBEDDING}, though config.json has "
            "tie_word_embeddings=true; set it to false to keep both"
        )


def by_rows(shape: tuple[int, ...], read: Callable[[slice], np.ndarray]) -> Streamed:
    """Return an array that is read lazily, with `read`, in blocks of rows of about `BLOCK_BYTES`."""
    return Streamed(shape, min(shape[0], max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))), read)


def by_layer(shape: tuple[int, ...], read_layer: Callable[[int], np.ndarray]) -> Streamed:
    """Return an array with a leading layer axis that is read layer by layer with `read_layer`."""
    return Streamed(shape, 1, lambda layers: np.asarray(read_layer(layers.start))[None])


def _import(weight: Weight, tensors: Mapping[str, Tensor], layers: int, sizes: Mapping[str, int]) -> Streamed:
    shape = shape_of(weight.our_axes, sizes)
    if not weight.has_layers:
        return by_rows(shape, tensors[weight.names[0]].read)
    stack = (len(weight.names),) if len(weight.names) > 1 else ()

    def layer(index: int) -> np.ndarray:
        arrays = [tensors[name.format(layer=index)].read() for name in weight.names]
        arrays = [rearrange(array, weight.axes, weight.our_axes, sizes) for array in arrays]
        return np.stack(arrays) if stack else arrays[0]

    return by_layer((layers, *stack, *shape), layer)


def _export_layer(
    reader: ParamsReader, model: ModelConfig, weight: Weight, gain_LE: np.ndarray | None, layer: int, index: int
) -> np.ndarray:
    """Read the tensor `weight.names[index]` of a layer from the checkpoint and convert it."""
    sizes = sizes_of(model)
    if weight.path == GAIN and model.head_norm == "rms":  # The official format requires a gain, so write ones.
        return np.ones(shape_of(weight.axes, sizes), np.float32)
    array = reader.read(weight.path, layer)
    if weight.path == OUTPUT and gain_LE is not None:
        array = array * gain_LE[layer, :, None]  # Fold the gain into W_O, because DiffLlama's norm has none.
    if len(weight.names) > 1:
        array = array[index]
    return rearrange(array, weight.our_axes, weight.axes, sizes)
