"""Conversion between run directories and model folders of other formats."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from difftx.config import Config, ModelConfig
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import UserError
from difftx.files import new_folder, write_atomically
from difftx.inference.load import read_checkpoint
from difftx.interop import huggingface, official, tokenizers
from difftx.interop.fields import FIXED
from difftx.interop.layouts import Format
from difftx.interop.parameters import export_params, import_params
from difftx.interop.safetensors import read_folder, write_folder
from difftx.interop.verify import compare_logits
from difftx.training.checkpoint.reading import Checkpoint, open_tokenizer
from difftx.training.checkpoint.weights import STEP, ParamsReader, save_params
from difftx.training.run import check_vocabulary, read_config, write_description

FORMATS: dict[Format, ModuleType] = {"hf": huggingface, "official": official}
CONFIG = "config.json"


def import_run(
    source: Path, out: Path, format_: Format, config: Config, overridden: Collection[str], verify: bool
) -> list[str]:
    """Create a run directory from a model in another format; return messages for the user.

    Args:
        source: Folder with config.json and safetensors files.
        out: Run directory to create.
        format_: Format of `source`.
        config: Config of the run. The model in `source` replaces some of its fields.
        overridden: Fields of `model` that the user has set. They must not be among the replaced fields.
        verify: Compare logits with transformers.

    Raises:
        UserError: the model has a feature that difftx lacks, or a file is corrupt.
    """
    fields = FORMATS[format_].model_fields(source / CONFIG)
    if clash := sorted(fields.keys() & overridden):
        raise UserError(f"--config.model.{clash[0]}: {source / CONFIG} determines this field; remove the flag")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))
    arrays = import_params(source, read_folder(source), format_, config.model)
    with new_folder(out) as folder:
        name, note = tokenizers.import_tokenizer(source, folder, out, config.data.tokenizer)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(config, tokenizer)
        write_description(folder, config)
        save_params(folder, arrays, config, {"tokenizer": fingerprint(tokenizer)})
        lines = [compare_logits(source, folder / "checkpoints" / str(STEP), config)] if verify else []
    return [f"{out}: a run of step {STEP}, {_describe(config.model)}", note, *lines]


def export_run(
    workdir: Path, out: Path, step: int | None, format_: Format, shard_bytes: int, verify: bool
) -> list[str]:
    """Write a run's checkpoint in another format; return messages for the user.

    Args:
        workdir: Run directory.
        out: Folder to create.
        step: Step of the checkpoint. None selects the newest one that verifies.
        format_: Format of `out`.
        shard_bytes: Size of the largest safetensors file.
        verify: Compare logits with transformers.

    Raises:
        UserError: the format cannot represent the model, or there is no such checkpoint.
    """

    def export(checkpoint: Checkpoint) -> list[str]:
        check_representable(checkpoint.config.model, format_)
        config, tokenizer = open_tokenizer(checkpoint)
        with new_folder(out) as folder:
            reader = ParamsReader(checkpoint.folder)
            files = write_folder(folder, export_params(reader, format_, config.model), shard_bytes)
            text = json.dumps(FORMATS[format_].config_json(config, tokenizer.eot_token), indent=2)
            write_atomically(folder / CONFIG, text + "\n")
            note = tokenizers.export_tokenizer(config, tokenizer, folder)
            lines = [compare_logits(folder, checkpoint.folder, config)] if verify else []
            checkpoint.require_unchanged()
        shards = files[0] if len(files) == 1 else f"{len(files)} safetensors files"
        return [f"{out}: {shards} of step {checkpoint.folder.name}, {_describe(config.model)}", note, *lines]

    return read_checkpoint(workdir, step, read_config(workdir), export, flag="--input")


def check_representable(model: ModelConfig, format_: Format) -> None:
    """Raise `UserError` for a model that a format cannot represent."""
    if model.architecture not in ("diff", "transformer"):
        raise UserError(f"model.architecture={model.architecture!r} cannot be converted; 'diff' and 'transformer' can")
    for name in ("lambda_learned", "lambda_init", "post_scale"):
        value = getattr(model, name)
        if model.architecture == "diff" and value != FIXED[name]:
            raise UserError(f"model.{name}={value}: other formats learn λ, with the λ_init and 1 - λ_init of the paper")
    if model.architecture == "diff" and model.head_norm not in ("rms", "rms_affine"):
        raise UserError(f"model.head_norm={model.head_norm!r}: other formats normalise each differential head")
    if model.attention_logit_bits is not None:
        raise UserError(
            f"model.attention_logit_bits={model.attention_logit_bits}: other formats do not quantise logits"
        )
    FORMATS[format_].check_model(model)


def _describe(model: ModelConfig) -> str:
    kv = "" if model.kv_heads == model.num_heads else f" ({model.kv_heads} key/value)"
    heads = f"{model.num_layers} layers, {model.num_heads} heads{kv} of d = {model.d_head}"
    return f"{model.architecture}: {heads}, {'tied' if model.tie_embeddings else 'untied'} embeddings"
