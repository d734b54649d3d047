"""The flags of `python -m difftx prepare --input=… --tokenizer=… --out=DIR`, which makes a token store from text."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from difftx.commands.flags import add_extension_flag
from difftx.data.prepare.job import Job
from difftx.data.prepare.pipeline import LOCAL, prepare
from difftx.data.prepare.readers import Fields
from difftx.errors import UserError
from difftx.files import require_local, require_local_paths, require_writable
from difftx.registry import load_extensions


def main(arguments: Sequence[str]) -> int:
    """Prepare a store and print a summary of its contents."""
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1  # Python ≥ 3.13 counts only available CPUs.
    parser = argparse.ArgumentParser("difftx prepare", description="Tokenise text into a store.", allow_abbrev=False)
    parser.add_argument("--input", required=True, help="file, folder, glob, or hf:NAME[:SPLIT[:CONFIG]]")
    parser.add_argument("--tokenizer", required=True, help="bytes, a tiktoken encoding, or a .tiktoken file")
    parser.add_argument("--out", required=True, type=Path, help="folder of the store")
    parser.add_argument("--valid_input", help="separate validation text; no other documents are then held out")
    parser.add_argument("--valid_fraction", type=float, default=0.01, help="share of documents held out (%(default)s)")
    parser.add_argument("--text_field", default="text", help="field of JSON lines and tables (%(default)s)")
    parser.add_argument("--prompt_field", help="field that precedes each text; the loss does not count its tokens")
    parser.add_argument("--id_field", help="field whose value `difftx data show` prints with each document")
    parser.add_argument("--workers", type=int, default=processors, help="number of processes (%(default)s)")
    parser.add_argument("--shard_tokens", type=int, default=2**27, help="tokens per shard (%(default)s)")
    parser.add_argument("--runner", default=LOCAL, help="local, or a runner of Apache Beam: direct, dataflow, flink …")
    parser.add_argument("--runner_options", default="", help="for Beam, such as '--region=europe-west4 --project=p'")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop", help="for unreadable documents")
    add_extension_flag(parser)
    options = parser.parse_args(arguments)
    _check(options)
    job = Job(
        input=options.input,
        valid_input=options.valid_input,
        out=options.out,
        tokenizer=options.tokenizer,
        fields=Fields(options.text_field, options.id_field, options.prompt_field),
        valid_fraction=options.valid_fraction,
        shard_tokens=options.shard_tokens,
        skip_unreadable=options.on_error == "skip",
        workers=options.workers,
        runner=options.runner,
        runner_options=options.runner_options,
    )
    return prepare(job)


def _check(options: argparse.Namespace) -> None:
    require_local_paths(options)
    if options.extension and options.runner != LOCAL:
        raise UserError(f"--extension={options.extension[0]}: only --runner={LOCAL} reads with extensions")
    load_extensions(options.extension)
    for flag in ("input", "valid_input"):
        if (pattern := getattr(options, flag)) is not None:
            require_local(f"--{flag}", pattern)
    require_writable(options.out)
    if not 0 <= options.valid_fraction < 1:
        raise UserError(f"--valid_fraction={options.valid_fraction} must lie in [0, 1)")
    for name in ("workers", "shard_tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name}={getattr(options, name)} must be positive")
