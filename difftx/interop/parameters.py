"""Conversion of parameters between difftx and other formats, one layer at a time.

Values stay bit-identical, except where the gain of a head norm is folded into W_O.
"""
#   L = layers, E = 2 d = width of a head's output

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from difftx.config import ModelConfig
from difftx.errors import UserError, did_you_mean
from difftx.interop.layouts import (
    EMBEDDING,
    GAIN,
    OUTPUT,
    UNEMBEDDING,
    Format,
    Weight,
    rearrange,
    shape_of,
    sizes_of,
    weights_of,
)
from difftx.interop.safetensors import Tensor
from difftx.training.checkpoint.weights import ParamsReader, Streamed

BLOCK_BYTES = 2**26  # Size of a block of embedding rows.
DERIVED = ".rotary_emb.inv_freq"  # Tensors of old Llama files that follow from the config.


def import_params(
    source: Path, tensors: Mapping[str, Tensor], format_: Format, model: ModelConfig
) -> dict[str, Streamed]:
    """Return difftx's parameters by path. Their values are read from `tensors` while they are written.

    Raises:
        UserError: a tensor is missing, has another shape or does not belong to the model.
    """
    sizes, weights = sizes_of(model), weights_of(format_, model)
    expected = {name: shape_of(weight.axes, sizes) for weight in weights for name in _names(weight, model.num_layers)}
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{source}: no tensor {name}.{did_you_mean(name, tensors)}")
        if tensors[name].shape != shape:
            raise UserError(
                f"{tensors[name].file}: {name} has shape {tensors[name].shape}, but config.json implies {shape}"
            )
    for name in tensors.keys() - expected.keys():
        if name == UNEMBEDDING:
            _check_tied(tensors[UNEMBEDDING], tensors[EMBEDDING])
        elif not name.endswith(DERIVED):
            raise UserError(f"{tensors[name].file}: {name} does not belong to the model that config.json describes")
    return {weight.path: _import(weight, tensors, model.num_layers, sizes) for weight in weights}


def export_params(reader: ParamsReader, format_: Format, model: ModelConfig) -> dict[str, Streamed]:
    """Return the tensors of another format by name. Their values are read from a checkpoint while they are written.

    All layers of a parameter are adjacent, because runs on few devices store all layers in one chunk.
    """
    sizes, tensors = sizes_of(model), {}
    # The gain, a few kilobytes, is read once, because the reader caches the chunks of one parameter only. Reading the
    # gain between layers would evict the chunks of W_O.
    is_folded = format_ == "hf" and model.head_norm == "rms_affine"
    gain_LE = reader.read(GAIN, slice(None)) if is_folded else None
    for weight in weights_of(format_, model):
        shape = shape_of(weight.axes, sizes)
        if not weight.has_layers:
            rows = partial(map, partial(reader.read, weight.path), _row_blocks(shape))
            tensors[weight.names[0]] = Streamed(shape, _block_rows(shape), rows)
            continue
        for layer in range(model.num_layers):
            for index, name in enumerate(weight.names):
                blocks = partial(_export_layer, reader, model, weight, gain_LE, layer, index)
                tensors[name.format(layer=layer)] = Streamed(shape, shape[0], blocks)
    return tensors


def _names(weight: Weight, layers: int) -> list[str]:
    return [name.format(layer=layer) for name in weight.names for layer in range(layers if weight.has_layers else 1)]


def _check_tied(unembedding: Tensor, embedding: Tensor) -> None:
    """Raise `UserError` unless an unexpected output embedding equals the input embedding."""
    is_equal = unembedding.shape == embedding.shape and all(
        np.array_equal(unembedding.read(rows), embedding.read(rows)) for rows in _row_blocks(embedding.shape)
    )
    if not is_equal:
        raise UserError(
            f"{unembedding.file}: {UNEMBEDDING} differs from {EMBEDDING}, though config.json has "
            "tie_word_embeddings=true; set it to false to keep both"
        )


def _row_blocks(shape: tuple[int, ...]) -> list[slice]:
    rows = _block_rows(shape)
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def _block_rows(shape: tuple[int, ...]) -> int:
    row_bytes = 4 * int(np.prod(shape[1:]))
    return min(shape[0], max(1, BLOCK_BYTES // row_bytes))


def _import(weight: Weight, tensors: Mapping[str, Tensor], layers: int, sizes: Mapping[str, int]) -> Streamed:
    shape = shape_of(weight.our_axes, sizes)
    if not weight.has_layers:
        tensor = tensors[weight.names[0]]
        return Streamed(shape, _block_rows(shape), lambda: map(tensor.read, _row_blocks(shape)))

    def blocks() -> Iterator[np.ndarray]:
        for layer in range(layers):
            parts = [
                rearrange(tensors[name.format(layer=layer)].read(), weight.axes, weight.our_axes, sizes)
                for name in weight.names
            ]
            yield (np.stack(parts) if stack else parts[0])[None]

    stack = (len(weight.names),) if len(weight.names) > 1 else ()
    return Streamed((layers, *stack, *shape), 1, blocks)


def _export_layer(
    reader: ParamsReader, model: ModelConfig, weight: Weight, gain_LE: np.ndarray | None, layer: int, index: int
) -> list[np.ndarray]:
    """Return the tensor `weight.names[index]` of a layer, as a single block."""
    sizes = sizes_of(model)
    if weight.path == GAIN and model.head_norm != "rms_affine":  # The official code always has a gain.
        return [np.ones(shape_of(weight.axes, sizes), np.float32)]
    array = reader.read(weight.path, layer)
    if weight.path == OUTPUT and gain_LE is not None:
        array = array * gain_LE[layer, :, None]  # Fold the gain into W_O, because Hugging Face's norm has none.
    if len(weight.names) > 1:
        array = array[index]
    return [rearrange(array, weight.our_axes, weight.axes, sizes)]
