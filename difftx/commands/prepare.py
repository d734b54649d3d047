"""Preparation of a token store from text: python -m difftx prepare --input=… --tokenizer=… --out=DIR.

The input is split into units. Workers tokenise each unit into a file, and then assemble the shards from these files. If
the command is stopped or killed, running it again resumes from the finished files. The bytes of the store depend on the
input and the options alone.
"""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftx.commands.flags import add_extension_flag
from difftx.data.prepare.beam import BeamWorkers
from difftx.data.prepare.job import Job, describe, input_states, open_job
from difftx.data.prepare.readers import Fields, Source, sources_of
from difftx.data.prepare.shards import SKIPPED, discard_damaged_shards, finish, make_plan
from difftx.data.prepare.units import discard_damaged_units
from difftx.data.prepare.workers import Workers
from difftx.data.store import SPLITS, read_meta
from difftx.errors import EXIT_PREEMPTED, RunError, UserError
from difftx.files import require_local, require_local_paths, require_writable
from difftx.registry import load_extensions

LOCAL = "local"


def main(arguments: Sequence[str]) -> int:
    """Prepare a store and print a summary of its contents."""
    options = _parse(arguments)
    job = Job(
        out=options.out,
        tokenizer=options.tokenizer,
        fields=Fields(options.text_field, options.id_field, options.prompt_field),
        valid_fraction=options.valid_fraction,
        shard_tokens=options.shard_tokens,
        skip=options.on_error == "skip",
    )
    sources: list[Source] = []
    for pattern, valid in ((options.valid_input, True), (options.input, False)):
        if pattern is not None:
            if options.out.resolve().is_relative_to(Path(pattern).resolve()):
                raise UserError(f"--out={options.out}: lies in the input {pattern}; choose a folder outside of it")
            sources += sources_of(pattern, valid=valid, first_index=len(sources))
    if len(sources) == 1 and sources[0].kind == "texts" and len(sources[0].files) == 1 and options.valid_fraction:
        sources = _split_in_two(sources[0], options.valid_fraction)
        print(f"{sources[0].files[0]}: a single text: its last {options.valid_fraction:.2%} is held out for validation")
    inputs = {"input": options.input, "valid_input": options.valid_input}
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        with _workers(job, options) as workers:
            description = describe(job, inputs, sources)
            with open_job(job, description, sources) as unfinished:
                if unfinished:
                    _prepare(job, sources, description, workers)
        _print_summary(job)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from what is finished in {job.work}", file=sys.stderr)
        return EXIT_PREEMPTED
    except MemoryError as error:
        raise RunError("out of memory; run the same command with fewer --workers, or split long documents") from error
    except OSError as error:
        if error.errno is not None:  # Errors of write calls do not name a file.
            error.filename = error.filename or str(job.out)
        raise
    return 0


def _split_in_two(source: Source, held_out: float) -> list[Source]:
    """Split a source that is one text file into a validation source and a training source."""
    valid_size = round(held_out * source.size)
    sizes = {True: valid_size, False: source.size - valid_size}
    return [
        dataclasses.replace(source, index=i, size=sizes[valid], valid=valid, held_out=held_out)
        for i, valid in enumerate((True, False))
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1  # Python ≥ 3.13 counts only available CPUs.
    parser = argparse.ArgumentParser("difftx prepare", description="Tokenise text into a store.", allow_abbrev=False)
    parser.add_argument("--input", required=True, help="file, folder, glob, or hf:NAME[:SPLIT[:CONFIG]]")
    parser.add_argument("--tokenizer", required=True, help="bytes, a tiktoken encoding, or a .tiktoken file")
    parser.add_argument("--out", required=True, type=Path, help="folder of the store")
    parser.add_argument("--valid_input", help="validation text of its own; then none is held out")
    parser.add_argument("--valid_fraction", type=float, default=0.01, help="share of documents held out (%(default)s)")
    parser.add_argument("--text_field", default="text", help="of JSON lines and tables (%(default)s)")
    parser.add_argument("--prompt_field", help="put in front of each text, and never a target of the loss")
    parser.add_argument("--id_field", help="kept beside the tokens, for `difftx data show`")
    parser.add_argument("--workers", type=int, default=processors, help="processes (%(default)s)")
    parser.add_argument("--shard_tokens", type=int, default=2**27, help="tokens a shard (%(default)s)")
    parser.add_argument("--runner", default=LOCAL, help="local, or one of Apache Beam's: direct, dataflow, flink …")
    parser.add_argument("--runner_options", default="", help="for Beam, such as '--region=europe-west4 --project=p'")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop", help="documents that cannot be read")
    add_extension_flag(parser)
    options = parser.parse_args(arguments)
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
    return options


def _workers(job: Job, options: argparse.Namespace) -> Workers | BeamWorkers:
    if options.runner == LOCAL:
        return Workers(options.workers, job)
    return BeamWorkers(options.runner, options.runner_options)


def _prepare(job: Job, sources: Sequence[Source], description: dict[str, Any], workers: Workers | BeamWorkers) -> None:
    states = input_states(sources)
    for line in (*discard_damaged_units(job), *discard_damaged_shards(job)):
        print(line, file=sys.stderr)
    workers.encode_units(job, sources)
    for name, state in input_states(sources).items():
        if state != states[name]:
            raise UserError(f"{name}: changed while it was read; run the same command again")
    plan = make_plan(job, sources)
    workers.write_shards(job, plan.shards)
    finish(job, description, plan)


def _print_summary(job: Job) -> None:
    meta = read_meta(job.out)
    for split in SPLITS:
        counts = meta["splits"][split]
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes of "
            f"text in {len(counts['shards'])} shards; {counts['duplicates']:,} duplicates left out"
        )
    if meta["empty"] or meta["skipped"]:
        print(f"left out: {meta['empty']:,} empty documents, {meta['skipped']:,} unreadable ({SKIPPED} names them)")
    print(f"{job.out}: prepared with {meta['tokenizer']['name']}")


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; a second signal then ends the process immediately."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt
