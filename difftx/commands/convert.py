"""Convert weights between formats: difftx convert --from=hf|official|difftx --to=… --input=DIR --out=DIR.

hf is a model folder for transformers, diffllama is a DiffLlama, and official is the layout of the paper's code. With
--differential, also make a differential model of a Transformer (docs/differentialize.md).
"""

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from difftx.commands.flags import CountFlag, Parser, PathFlag, add_weights_flag
from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.errors import UserError, install_hint, printable
from difftx.files import downloaded, list_folder, require_writable
from difftx.folders import is_taken, new_folder
from difftx.interop import SHARD_MIB
from difftx.storage.paths import is_bucket

OURS = "difftx"
FORMATS = (OURS, "hf", "official")  # "hf" reads DiffLlama too.
METHODS = {"zero-branch": "zero_branch", "dex": "dex", "split": "diff"}  # Value of --differential → architecture.


def main(arguments: Sequence[str]) -> int:
    """Read the flags and convert. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser("difftx convert", __doc__, "config")
    parser.add_argument("--from", dest="source", required=True, choices=FORMATS, help="format of --input")
    parser.add_argument("--to", dest="target", required=True, choices=(*FORMATS, "diffllama"), help="format of --out")
    parser.add_argument(
        "--input", action=PathFlag, required=True, metavar="DIR", help="run directory, or folder of a model"
    )
    parser.add_argument("--out", action=PathFlag, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--step", type=int, help="step of the run's checkpoint; default: the newest")
    add_weights_flag(parser)
    parser.add_argument("--config", metavar="FILE.py[:ARG]", help="config of the new run")
    size = "largest size of a safetensors file"
    parser.add_argument("--shard_mib", action=CountFlag, default=SHARD_MIB, help=size)
    method = "make a differential model of a Transformer; see docs/differentialize.md"
    parser.add_argument("--differential", choices=METHODS, help=method)
    chosen = "heads that dex corrects: the half of each layer with the highest entropy on data.path, or all"
    parser.add_argument("--dex_heads", choices=("entropy", "all"), default="entropy", help=chosen)
    how = "compare logits and greedy text with the package transformers; both models must fit in memory"
    parser.add_argument("--verify", action="store_true", help=how)
    options, overrides = parser.parse(arguments)
    given = {name.split(".")[1] for name in overrides if name.startswith("model.")}
    if options.differential is not None:
        head_norm = "rms_affine" if options.differential == "split" else "none"
        overrides = {"model.head_norm": head_norm} | overrides | {"model.architecture": METHODS[options.differential]}
    config = _checked(options, overrides)

    # Imported after the flags are checked, because the import is slow.
    from difftx.interop import runs
    from difftx.training.checkpoint.checkpointer import Checkpoints

    step, part, verify = options.step, options.weights, options.verify
    with new_folder(options.out, "config.json") as folder:
        if options.source == options.target:
            run = Checkpoints(options.input)
            lines = runs.differentialize_run(run, folder, step, overrides, part, options.dex_heads)
        elif config is None:
            size = options.shard_mib * 2**20
            form: dict[str, Any] = {"step": step, "format_": options.target, "shard_bytes": size, "part": part}
            lines = runs.export_run(Checkpoints(options.input), folder, str(options.out), **form, verify=verify)
        else:
            heads = options.dex_heads if options.differential else None
            form = {"format_": options.source, "config": config, "overridden": given, "dex_heads": heads}
            out = str(options.out if is_bucket(options.out) else options.out.absolute())  # The config names its files.
            with downloaded(options.input) as source:
                lines = runs.import_run(source, folder, out, **form, verify=verify)
    print(*map(printable, [f"{options.out}: {lines[0]}", *lines[1:]]), sep="\n")
    return 0


def _checked(options: argparse.Namespace, overrides: Mapping[str, str]) -> Config | None:
    """Check the flags. Return the config of the new run for an import, or None if `--input` is a run."""
    _check_formats(options)
    if not (list_folder(options.input) if is_bucket(options.input) else options.input.is_dir()):
        raise UserError(f"--input={options.input}: no such folder")
    if is_taken(options.out, "config.json"):
        raise UserError(f"--out={options.out} exists already; name a new folder")
    if not is_bucket(options.out) and not options.out.absolute().parent.is_dir():
        raise UserError(f"--out={options.out}: there is no folder {options.out.absolute().parent}")
    require_writable(options.out)
    if options.verify:
        _require_transformers({options.source, options.target})
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
    """Raise `UserError` if the formats do not fit to each other or to --differential."""
    method, both = options.differential, f"--from={options.source} --to={options.target}"
    if method is not None and options.target != OURS:
        raise UserError(f"--differential={method} makes a run; it requires --to={OURS}")
    if options.dex_heads != "entropy" and method != "dex":
        raise UserError(f"--dex_heads={options.dex_heads} requires --differential=dex")
    if method is None and (options.source == OURS) == (options.target == OURS):
        raise UserError(f"{both}: exactly one of them must be {OURS}, unless --differential is set")


def _require_transformers(formats: set[str]) -> None:
    if formats == {OURS}:
        raise UserError("--verify compares with the package transformers; it requires --from=hf or --to=hf")
    if "official" in formats:
        raise UserError("--verify compares with the package transformers, which has no model of the official layout")
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--verify requires {' and '.join(missing)}: {install_hint('parity')}")
