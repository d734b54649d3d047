"""Convert between run directories and model folders of other formats, and compare their logits."""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from difftx.config import Config, ModelConfig
from difftx.config.build import config_from_dict, override
from difftx.config.fields import values_of
from difftx.config.model import default_specific_fields
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizer import Tokenizer
from difftx.errors import RunError, UserError
from difftx.files import write_atomically
from difftx.inference.decode import LanguageModel
from difftx.interop import differential, huggingface, in_transformers, official, remote_code_config, tokenizers
from difftx.interop.card import write_card, write_generation_config
from difftx.interop.compressed import Bits, compress
from difftx.interop.differential import Heads, copied_params, is_changeable
from difftx.interop.fields import CONFIG, Fields, check_model, config_json, determined_fields, with_fields
from difftx.interop.parameters import Format, architectures_of, export_params, import_params, peft_tensors
from difftx.interop.safetensors import read_folder, write_folder, write_tensors
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads, heads_of
from difftx.model.lora import LORA
from difftx.parallel.mesh import batch_shards, make_mesh
from difftx.training.checkpoint.manifest import Manifest, WeightsPart, adapters_of, array_name
from difftx.training.checkpoint.reading import Checkpoint, open_sources, open_tokenizer
from difftx.training.checkpoint.restoring import on_mesh, restore_params
from difftx.training.checkpoint.weights import STEP, ParamsReader, save_params
from difftx.training.fit import fit
from difftx.training.run import write_run_files
from difftx.training.state import graph, init_params
from difftx.training.trainable import trainable

FORMATS: dict[Format, ModuleType] = {"hf": remote_code_config, "diffllama": huggingface, "official": official}
PROMPTS = 5  # Compare the greedy text of at least this many prompts.
TOKENS = 64  # Compare logits on rows of at most this many tokens.
TOLERANCE = 1e-4  # Largest difference relative to the largest logit, for differently ordered float32 sums.
COMPARED_PARAMETERS = 500_000_000  # After a conversion, compare logits only for models up to this size.


def import_run(
    source: Path,
    folder: Path,
    out: str,
    *,
    format_: Format,
    config: Config,
    overridden: Collection[str],
    verify: bool,
    dex_heads: Heads | None = None,
) -> list[str]:
    """Convert the model folder `source` of another format to a run in `folder`. Return messages for the user.

    The caller later moves `folder` to `out`. The user must not have `overridden` fields of `config.model` that the
    config.json in `source` determines. If `verify` is set, compare the logits with those of transformers. If
    `dex_heads` is set, also convert the source's Transformer to the architecture in `config`, as `differentialize`
    does.
    """
    format_, module, described = _read_model(source, format_)
    if verify and format_ == "motif":
        why = "transformers has no MotifForCausalLM, and difftx executes no code of a folder"
        raise UserError(f"--verify: {why}; leave the flag out")
    fields = determined_fields(module, described)
    chosen = config.model
    if dex_heads is not None:
        fields = default_specific_fields() | fields
        overridden = {name for name in overridden if not is_changeable(name, chosen.architecture)}
    if clash := sorted(fields.keys() & overridden):
        raise UserError(f"--config.model.{clash[0]}: {source / CONFIG} determines this field; remove the flag")
    config = dataclasses.replace(config, model=with_fields(chosen, fields | {"matched": {}}))
    model = config.model if dex_heads is None else differential.new_model(config.model, chosen)
    new = dataclasses.replace(config, model=model)
    fit(new)
    arrays = import_params(source, read_folder(source), format_, config.model)
    name, tokenizer, note = tokenizers.import_tokenizer(
        source, folder, out, config.data.tokenizer, config.data.end_of_text
    )
    config, new = (each.but(data={"tokenizer": name}) for each in (config, new))
    fit(config, tokenizer=tokenizer)
    # If the Transformer is to be converted (`dex_heads`), it is only a temporary run in a subfolder.
    imported = folder if dex_heads is None else folder / "transformer"
    checkpoint = save_params(imported, arrays, config, {"tokenizer": tokenizer.fingerprint})
    lines = [compare_logits(source, checkpoint, config)] if verify else []
    if dex_heads is not None:
        read = functools.partial(load_sources, config.data, tokenizer)
        lines += _differentialize(checkpoint, "params", config, new, read, tokenizer, dex_heads, folder)
        shutil.rmtree(imported)
    write_run_files(folder, new)
    return [f"a run of step {STEP}, {_describe(model)}", note, *lines]


def _read_model(source: Path, format_: Format) -> tuple[Format, ModuleType, ModelConfig]:
    """Return the format of a folder's weights, the module that reads its config.json, and the model."""
    path = source / CONFIG
    is_ours = format_ == "hf" and remote_code_config.is_ours(path)
    module = huggingface if format_ == "hf" and not is_ours else FORMATS[format_]
    model = module.read(Fields(path))
    return huggingface.LAYOUTS.get(model.architecture, format_) if module is huggingface else format_, module, model


def open_folder(source: Path) -> LanguageModel:
    """Load a model folder for transformers onto the first device, without creating a run.

    The config has the folder's model, tokenizer and row length. It computes in bfloat16 only if the folder's weights
    are bfloat16. Raise `UserError` if difftx cannot import the folder.
    """
    format_, _, model = _read_model(source, "hf")
    fields = Fields(source / CONFIG)
    dtype = fields.get("dtype", str, fields.get("torch_dtype", str, "float32"))
    model = dataclasses.replace(model, compute_dtype="bfloat16" if dtype == "bfloat16" else "float32")
    name, tokenizer = tokenizers.open_tokenizer(source)
    length = fields.get("max_position_embeddings", int)
    data, train = {"tokenizer": name, "sequence_length": length}, {"global_batch_tokens": length}
    groups = {"model": values_of(model), "data": data, "train": train, "mesh": {"fsdp": 1}}
    config = fit(config_from_dict(groups), tokenizer=tokenizer)
    mesh = make_mesh(config.mesh, jax.local_devices()[:1])
    arrays = import_params(source, read_folder(source), format_, config.model)
    with jax.set_mesh(mesh):
        abstract = on_mesh(jax.eval_shape(lambda: init_params(config)), mesh)

    def param(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.concatenate([block for _, block in arrays[array_name(path)].parts()]), leaf.sharding)

    return LanguageModel(config, mesh, jax.tree.map_with_path(param, abstract), tokenizer)


def differentialize(checkpoint: Checkpoint, folder: Path, overrides: Mapping[str, str], dex_heads: Heads) -> list[str]:
    """Convert the Transformer of a checkpoint to another architecture, and write it as a run to `folder`.

    Return messages for the user. `overrides` change the run's config, and must include `model.architecture`.
    `import_run` explains `dex_heads`.
    """
    names = [name.removeprefix("model.") for name in overrides if name.startswith("model.")]
    architecture = overrides["model.architecture"]
    clash = sorted(name for name in names if name != "architecture" and not is_changeable(name, architecture))
    if clash:
        raise UserError(f"--config.model.{clash[0]}: --input determines this field; remove the flag")
    config, tokenizer = open_tokenizer(checkpoint)
    transformer = config.model
    differential.require_convertible(transformer, architecture)
    # Set `head_dim`. By default, the new model would divide `d_model` by twice as many (sub-)heads.
    chosen = override(config.but(model={"head_dim": heads_of(transformer).d_head}), overrides)
    config = dataclasses.replace(chosen, model=transformer)
    new = dataclasses.replace(chosen, model=differential.new_model(transformer, chosen.model))
    fit(new)

    def read() -> Sources:
        if any(name.startswith("data.") for name in overrides):  # The user has chosen other data.
            return load_sources(config.data, tokenizer)
        return open_sources(checkpoint, tokenizer)

    lines = _differentialize(checkpoint.manifest, checkpoint.part, config, new, read, tokenizer, dex_heads, folder)
    write_run_files(folder, new, {"source_weights": checkpoint.weights})
    return [f"a run of step {STEP}, {_describe(new.model)}", *lines]


def merge(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Merge the adapters of a checkpoint into its weights, and write a run at step 0 to `folder`. Return messages."""
    config, tokenizer = open_tokenizer(checkpoint)
    rank, reader = _require_adapters(checkpoint, "--merge"), ParamsReader(checkpoint.manifest, checkpoint.part)
    new = config.but(train={"lora_rank": None, "trainable": ()})
    save_params(folder, copied_params(reader, config.model), new, {"tokenizer": tokenizer.fingerprint})
    write_run_files(folder, new, {"source_weights": checkpoint.weights})
    return [f"a run of step {STEP}, {_describe(new.model)}", f"adapters of rank {rank} merged into its weights"]


def export_adapters(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Write the adapters of a checkpoint to `folder` in the format of the package peft. Return messages."""
    model, train = checkpoint.config.model, checkpoint.config.train
    rank = _require_adapters(checkpoint, "--to=peft")
    check_representable(model, "hf")
    if others := sorted(name for name in trainable(checkpoint.config) if not name.startswith(f"{LORA}/")):
        raise UserError(
            f"--to=peft: the run has trained {others[0]} too, which adapters do not contain; use --to=hf, which has "
            "merged weights"
        )
    tensors, modules = peft_tensors(ParamsReader(checkpoint.manifest, checkpoint.part), model, rank)
    write_tensors(folder / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": rank}
    settings |= {"lora_alpha": train.lora_alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": modules}
    write_atomically(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
    source = checkpoint.config.checkpoint.init_from or "the start of this run"
    return [f"adapters of rank {rank} of {', '.join(modules)}", f"they belong to the weights of {source}"]


def _require_adapters(checkpoint: Checkpoint, flag: str) -> int:
    """Return the rank of a checkpoint's adapters, or raise `UserError` if it has none."""
    if (rank := adapters_of(checkpoint.manifest, checkpoint.part)["lora_rank"]) is None:
        folder = checkpoint.manifest.folder
        raise UserError(f"{flag}: {folder} has no adapters; training with train.lora_rank saves them")
    return rank


def _differentialize(
    checkpoint: Manifest,
    part: WeightsPart,
    config: Config,
    new: Config,
    read_data: Callable[[], Sources],
    tokenizer: Tokenizer,
    dex_heads: Heads,
    folder: Path,
) -> list[str]:
    """Convert a Transformer's checkpoint to the model of the config `new`, and write it to `folder`.

    `config` is the Transformer's config. `read_data` opens the data. "dex" chooses heads on its validation rows.
    """
    mesh = make_mesh(config.mesh)
    chosen_LH = None
    lines = []
    if new.model.architecture == "dex" and dex_heads == "entropy":
        chosen_LH = differential.heads_by_entropy(config, mesh, checkpoint, part, read_data())
        lines.append(f"heads of highest entropy: {int(chosen_LH[0].sum())} of {new.model.num_heads} in each layer")
    with jax.set_mesh(mesh):
        arrays = differential.new_params(ParamsReader(checkpoint, part), config.model, new, chosen_LH)
        converted = save_params(folder, arrays, new, {"tokenizer": tokenizer.fingerprint})
    before, after = (count_parameters(each).total for each in (config.model, new.model))
    return [
        *lines,
        f"parameters: {before:,} in the Transformer, {after - before:,} added, {after:,} now",
        _check_function(checkpoint, part, config, converted, new, mesh),
    ]


def _check_function(
    checkpoint: Manifest, part: WeightsPart, config: Config, converted: Manifest, new: Config, mesh: jax.sharding.Mesh
) -> str:
    """Compare the logits of a Transformer and of the converted model. Return a message."""
    is_preserved = new.model.architecture != "diff"
    claim = f"the function is {'preserved' if is_preserved else 'not preserved'}"
    if count_parameters(config.model).total > COMPARED_PARAMETERS:
        return f"{claim}; not compared, because the model has more than {COMPARED_PARAMETERS:,} parameters"
    tokens_BT = _random_tokens(config, mesh, 2 * batch_shards(mesh))
    before_BTV = our_logits(checkpoint, config, mesh, tokens_BT, part)
    after_BTV = our_logits(converted, new, mesh, tokens_BT)
    error = float(np.linalg.norm(after_BTV - before_BTV) / np.linalg.norm(before_BTV))
    line = f"logits of {tokens_BT.size} random tokens differ from the Transformer's by {error:.1e} of their norm"
    if is_preserved and not error <= TOLERANCE:
        raise RunError(f"{line}, which is more than rounding; nothing was written")
    return f"{claim}: {line}"


def write_export(
    checkpoint: Checkpoint,
    files: Path,
    folder: Path,
    out: str,
    format_: Format,
    shard_bytes: int,
    bits: Bits | None = None,
    verify: bool = False,
) -> list[str]:
    """Export a checkpoint to `folder`, which is later renamed to `out`. Return messages.

    `files` is a folder with the small files of the run. If `bits` is set, the weights of products are rounded. If
    `verify` is set, compare logits, greedy text and token ids with those of transformers.
    """
    step, model, part = checkpoint.manifest.step, checkpoint.config.model, checkpoint.part
    module = check_representable(model, format_)
    config, tokenizer = open_tokenizer(checkpoint)
    tensors = export_params(ParamsReader(checkpoint.manifest, part), format_, model)
    settings = config_json(module, config, tokenizer.eot_token)
    if bits is not None:
        tensors, settings["quantization_config"] = compress(tensors, bits)
    shards = write_folder(folder, tensors, shard_bytes)
    write_atomically(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    note = tokenizers.export_tokenizer(config, tokenizer, folder, settings.get("model_type"))
    if module is remote_code_config:
        shutil.copyfile(remote_code_config.MODELING, folder / remote_code_config.MODELING.name)
    if format_ != "official":
        write_generation_config(folder, tokenizer, model.embeddings)
        write_card(folder, PurePosixPath(out).name, settings, checkpoint, files)
    written = shards[0] if len(shards) == 1 else f"{len(shards)} safetensors files"
    what = f"step {step}" if part == "params" else f"{part} of step {step}"
    lines = [f"{written} of {what}, {_describe(model)}", note]
    if verify:
        trained = checkpoint.config if bits is None else checkpoint.config.but(model={"matmul": f"{bits}_weights"})
        lines.append(compare_logits(folder, checkpoint.manifest, trained, part))
        if tokenizers.has_tokenizer(folder):
            lines.append(in_transformers.compare_tokenizer(folder, tokenizer))
    return lines


def check_representable(model: ModelConfig, format_: Format) -> ModuleType:
    """Return the module that writes the config.json. Raise `UserError` if the format cannot represent the model."""
    if model.architecture not in (known := architectures_of(format_)):
        raise UserError(
            f"model.architecture={model.architecture!r} cannot be converted with --to={format_}; "
            f"{', '.join(known)} can{'' if format_ == 'hf' else ', and --to=hf converts all'}"
        )
    if format_ == "hf" and model.architecture == "transformer":
        with contextlib.suppress(UserError):  # A `LlamaForCausalLM` needs no modelling file.
            check_model(huggingface, model)
            return huggingface
    check_model(FORMATS[format_], model)
    return FORMATS[format_]


def _describe(model: ModelConfig) -> str:
    embeddings = f"{'tied' if model.tie_embeddings else 'untied'} embeddings"
    return f"{model.architecture}: {model.num_layers} layers, {describe_heads(model)}, {embeddings}"


def compare_logits(folder: Path, checkpoint: Manifest, config: Config, part: WeightsPart = "params") -> str:
    """Compare float32 logits and greedy text with transformers. Return a message.

    transformers continues random prompts greedily, with its cache. Raise `RunError` if a logit on these tokens differs
    by more than `TOLERANCE` times the largest logit, or if the logit of a chosen token is lower than difftx's largest
    logit by more than that.
    """
    mesh = make_mesh(config.mesh)
    rows = -(-PROMPTS // batch_shards(mesh)) * batch_shards(mesh)
    random_BT = _random_tokens(config, mesh, rows)
    model, start = in_transformers.load(folder), random_BT.shape[1] // 2
    tokens_BT = np.concatenate([random_BT, in_transformers.greedy(model, random_BT[:, :start], random_BT.shape[1])])
    theirs_BTV = in_transformers.logits(model, tokens_BT)
    ours_BTV = our_logits(checkpoint, config, mesh, tokens_BT, part)
    error, largest = float(np.abs(ours_BTV - theirs_BTV).max()), float(np.abs(theirs_BTV).max())
    line = f"logits of {tokens_BT.size} tokens differ from transformers' by at most {error:.1e} of {largest:.1f}"
    if not error <= TOLERANCE * largest:
        raise RunError(f"{line}: more than rounding; nothing was written")
    chosen_BT1, before_BTV = tokens_BT[rows:, start:, None], ours_BTV[rows:, start - 1 : -1]
    behind_BT1 = before_BTV.max(-1, keepdims=True) - np.take_along_axis(before_BTV, chosen_BT1, -1)
    if not behind_BT1.max() <= TOLERANCE * largest:
        raise RunError(f"the greedy text of transformers is not that of difftx, though {line}; nothing was written")
    return f"verified: {line}; the greedy text of {rows} prompts is equal"


def _random_tokens(config: Config, mesh: jax.sharding.Mesh, rows: int) -> np.ndarray:
    """Return `rows` rows of random tokens. The mesh can split their length."""
    chunks = 2 * mesh.shape["context"]  # The context axis splits a row into at most this many equal chunks.
    length = min(TOKENS, config.data.sequence_length) // chunks * chunks
    return np.random.default_rng(0).integers(config.model.embeddings, size=(rows, length))


def our_logits(
    checkpoint: Manifest, config: Config, mesh: jax.sharding.Mesh, tokens_BT: np.ndarray, part: WeightsPart = "params"
) -> np.ndarray:
    """Compute the logits of a verified checkpoint with difftx, in float32."""
    config = config.but(model={"compute_dtype": "float32", "attention_implementation": "xla"})
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        params = restore_params(checkpoint, config, mesh, part)
        graphdef = graph(config)
        logits = jax.jit(lambda params, tokens_BT: nnx.merge(graphdef, params)(tokens_BT)[0])
        return np.asarray(logits(params, tokens_BT.astype(np.int32)))
