"""Convert weights between formats: difftx convert --from=hf|official|difftx --to=… --input=DIR --out=DIR.

hf is a model folder for transformers, diffllama is a DiffLlama, and official is the layout of the paper's code. With
--differential, also make a differential model of a Transformer (docs/differentialize.md).
"""

import argparse
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from difftx.commands.flags import CountFlag, Parser, PathFlag, add_weights_flag
from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.data.tokenizer_files import FILES
from difftx.errors import RunError, UserError, install_hint, note_copy, printable
from difftx.files import downloaded, is_taken, list_folder, new_folder, require_writable, write_atomically
from difftx.interop import SHARD_MIB
from difftx.storage import hub
from difftx.storage.paths import is_bucket

if TYPE_CHECKING:
    from difftx.training.checkpoint.reading import Checkpoint

OURS = "difftx"
FORMATS = (OURS, "hf", "official")  # "hf" also reads DiffLlama.
# Files to download, as named by `save_pretrained` in transformers.
MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"]
MODEL_FILES += ["model.safetensors.index.json", *FILES]
SOURCE = "source.json"  # File of a run that was made from a model on the Hub.
PEFT = "peft"  # The adapters of a run, for the package peft.
METHODS = {"zero-branch": "zero_branch", "dex": "dex", "split": "diff"}  # Value of --differential → architecture.


def main(arguments: Sequence[str]) -> int:
    """Read the flags and convert. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser("difftx convert", __doc__, "config")
    parser.add_argument("--from", dest="source", required=True, choices=FORMATS, help="format of --input")
    targets = (*FORMATS, "diffllama", PEFT)
    parser.add_argument("--to", dest="target", required=True, choices=targets, help="format of --out")
    parser.add_argument(
        "--input",
        action=PathFlag,
        required=True,
        metavar="DIR",
        help="run directory, or folder of a model; with --from=hf, also a model of the hub, ORG/NAME[@REVISION]",
    )
    parser.add_argument("--out", action=PathFlag, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--step", type=int, help="step of the run's checkpoint; default: the newest")
    add_weights_flag(parser)
    parser.add_argument("--config", metavar="FILE.py[:ARG]", help="config of the new run")
    size = "largest size of a safetensors file"
    parser.add_argument("--shard_mib", action=CountFlag, default=SHARD_MIB, help=size)
    method = "make a differential model of a Transformer; see docs/differentialize.md"
    parser.add_argument("--differential", choices=METHODS, help=method)
    fold = "merge the adapters of LoRA into the weights of the new run; all formats except peft have merged weights"
    parser.add_argument("--merge", action="store_true", help=fold)
    chosen = "heads that dex corrects: the half of each layer with the highest entropy on data.path, or all"
    parser.add_argument("--dex_heads", choices=("entropy", "all"), default="entropy", help=chosen)
    how = "compare logits and greedy text with the package transformers; both models must fit in memory"
    where = "upload the folder of --to=hf to this private repository of the hub, after it was compared with the run"
    parser.add_argument("--push", metavar="ORG/NAME", help=where)
    rounded = "round the weights of attention and MLP, in the format of compressed-tensors; requires --to=hf"
    parser.add_argument("--quantize", choices=("int8", "int4"), help=rounded)
    parser.add_argument("--verify", action="store_true", help=how)
    options, overrides = parser.parse(arguments)
    given = {name.split(".")[1] for name in overrides if name.startswith("model.")}
    if options.differential is not None:
        head_norm = "rms_affine" if options.differential == "split" else "none"
        overrides = {"model.head_norm": head_norm} | overrides | {"model.architecture": METHODS[options.differential]}
    config = _checked(options, overrides)

    # Imported after the flags are checked, because the imports are slow.
    from difftx.inference.load import read_checkpoint
    from difftx.interop import runs
    from difftx.run_files import pulled
    from difftx.training.checkpoint.checkpointer import Checkpoints
    from difftx.training.run import read_config

    step, part, verify = options.step, options.weights, options.verify
    source, record, out = options.input, None, str(options.out)
    if _is_on_hub(options):
        source, record = _download(str(options.input))

    def read[T](at: int | None, function: "Callable[[Checkpoint], T]") -> T:
        run = Checkpoints(options.input)
        return read_checkpoint(run, at, read_config(run.workdir), function, flag="--input", part=part)

    if options.push:
        step = read(step, lambda checkpoint: checkpoint.manifest.step)
    with new_folder(options.out, "config.json") as folder:
        if options.merge:
            lines = read(step, lambda checkpoint: runs.merge(checkpoint, folder))
        elif options.source == options.target:
            lines = read(step, lambda found: runs.differentialize(found, folder, overrides, options.dex_heads))
        elif options.target == PEFT:
            lines = read(step, lambda checkpoint: runs.export_adapters(checkpoint, folder))
        elif config is None:
            form: dict[str, Any] = {"format_": options.target, "shard_bytes": options.shard_mib * 2**20}
            form |= {"verify": verify, "bits": options.quantize}
            lines = read(step, lambda found: runs.write_export(found, pulled(options.input), folder, out, **form))
            if options.push:
                read(step, functools.partial(_require_equal, folder))
        else:
            heads = options.dex_heads if options.differential else None
            form = {"format_": options.source, "config": config, "overridden": given, "dex_heads": heads}
            out = out if is_bucket(options.out) else str(options.out.absolute())  # The config names its files.
            with downloaded(source) as local:
                lines = runs.import_run(local, folder, out, **form, verify=verify)
            if record is not None:
                write_atomically(folder / SOURCE, json.dumps(record, indent=2) + "\n")
                lines.append(f"made from {record['repository']} at commit {record['commit']}")
    if options.push:
        lines.append(f"pushed to {hub.push(f'--push={options.push}', options.push, options.out)}")
    print(*map(printable, [f"{options.out}: {lines[0]}", *lines[1:]]), sep="\n")
    return 0


def _is_on_hub(options: argparse.Namespace) -> bool:
    """Return whether --input names a model on the Hub, and not a local folder."""
    name = re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", str(options.input))
    return options.source == "hf" and name is not None and not options.input.is_dir()


def _download(name: str) -> tuple[Path, dict[str, Any]]:
    """Download config, tokenizer and weights of a model on the Hub. Return the folder, and a record of its origin."""
    repository, _, revision = name.partition("@")
    where = f"--input={name} is no folder here"
    try:
        hub.library()
    except UserError as error:
        raise UserError(f"{where}; to download it from the hub, install the extra hub: {error}") from error
    folder, commit = hub.download(where, repository, revision or None, MODEL_FILES)
    note_copy(str(folder), f"{repository}@{commit[:12]}")
    return folder, {"repository": repository, "revision": revision or None, "commit": commit}


def _require_equal(folder: Path, checkpoint: "Checkpoint") -> None:
    """Read an exported folder like an import. Raise `RunError` if any value differs from the checkpoint."""
    from difftx.interop.parameters import import_params
    from difftx.interop.safetensors import read_folder
    from difftx.training.checkpoint.weights import ParamsReader

    reader = ParamsReader(checkpoint.manifest, checkpoint.part)
    for path, array in import_params(folder, read_folder(folder), "hf", checkpoint.config.model).items():
        for rows, block in array.parts():
            if not np.array_equal(block, reader.read(path, rows)):
                raise RunError(f"{folder}: {path} differs from the checkpoint; nothing was pushed; {hub.AGAIN}")


def _checked(options: argparse.Namespace, overrides: Mapping[str, str]) -> Config | None:
    """Check the flags. For an import, return the config of the new run. If `--input` is a run, return None."""
    _check_formats(options)
    is_folder = list_folder(options.input) if is_bucket(options.input) else options.input.is_dir()
    if not is_folder and not _is_on_hub(options):
        raise UserError(f"--input={options.input}: no such folder")
    if is_taken(options.out, "config.json"):
        raise UserError(f"--out={options.out} exists already; name a new folder")
    if not is_bucket(options.out) and not options.out.absolute().parent.is_dir():
        raise UserError(f"--out={options.out}: there is no folder {options.out.absolute().parent}")
    require_writable(options.out)
    if options.push and (options.target != "hf" or is_bucket(options.out)):
        raise UserError(f"--push={options.push} requires --to=hf and a local --out, whose files it uploads")
    if options.quantize and (options.target != "hf" or options.push):
        raise UserError(f"--quantize={options.quantize} requires --to=hf, and no --push; upload the folder yourself")
    if options.verify:
        _require_transformers({options.source, options.target}, options.quantize is not None)
    if options.source != OURS:
        if options.step is not None:
            raise UserError("--step selects a checkpoint of a run; it requires --from=difftx")
        if options.weights != "params":
            raise UserError(f"--weights={options.weights} selects weights of a run; it requires --from=difftx")
        if options.config is None:
            raise UserError("--to=difftx requires --config=FILE.py, the config of the new run (docs/config.md)")
        return load_config(options.config, overrides)
    if options.config is not None or (overrides and options.target != OURS):
        given = f"--config={options.config}" if options.config else f"--config.{next(iter(overrides))}"
        raise UserError(f"{given} requires --from=hf or official; the run in --input has its own config")
    return None


def _check_formats(options: argparse.Namespace) -> None:
    """Raise `UserError` if the formats do not fit together, or do not fit --differential."""
    method, both = options.differential, f"--from={options.source} --to={options.target}"
    if method is not None and options.target != OURS:
        raise UserError(f"--differential={method} makes a run; it requires --to={OURS}")
    if options.dex_heads != "entropy" and method != "dex":
        raise UserError(f"--dex_heads={options.dex_heads} requires --differential=dex")
    if options.merge and (method is not None or not options.source == options.target == OURS):
        raise UserError(f"--merge requires --from={OURS} --to={OURS}, without --differential; other formats are merged")
    is_new = method is not None or options.merge
    if not is_new and (options.source == OURS) == (options.target == OURS):
        raise UserError(f"{both}: exactly one of them must be {OURS}, unless --differential or --merge is set")


def _require_transformers(formats: set[str], quantized: bool) -> None:
    if formats.isdisjoint(("hf", "diffllama")):
        raise UserError("--verify compares with the package transformers; it requires --from=hf or --to=hf")
    packages = ("torch", "transformers", *(["compressed_tensors"] if quantized else []))
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--verify requires {' and '.join(missing)}: {install_hint('parity')}")
