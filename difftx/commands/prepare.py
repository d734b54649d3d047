"""The command `difftx prepare --input=… --tokenizer=… --out=DIR`, which makes a token store from text.

It tokenises the input in parts (units), then assembles these into the shards of a store. If it is stopped or killed,
the same command resumes from the finished files. The bytes of the store only depend on the input and the options.
"""

import argparse
import dataclasses
import datetime
import os
import signal
import sys
from collections.abc import Sequence

from difftx.commands.flags import CountFlag, Parser, PathFlag, add_extension_flag, prepare_process, value_flag
from difftx.config.fields import Positive, UnitHalfOpen
from difftx.data.prepare import assembly
from difftx.data.prepare.job import Job, describe, input_states, open_job, pinned_commit, with_states
from difftx.data.prepare.readers import TOKEN_FILES, Fields, Source, sources_of
from difftx.data.prepare.workers import Workers
from difftx.data.store import SPLITS, read_meta
from difftx.errors import EXIT_PREEMPTED, UserError, printable
from difftx.files import is_below, require_writable
from difftx.storage import hub
from difftx.storage.paths import path_of


def main(arguments: Sequence[str]) -> int:
    """Parse and check the flags, then run `prepare`."""
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1  # Available CPUs; before Python 3.13, all CPUs.
    parser = Parser("difftx prepare", "Tokenise text into a store.")
    paths = "file, folder or glob, also in a bucket, gs://… or s3://…"
    on_hub = "hf://datasets/ORG/NAME@REVISION/GLOB, which is streamed, or hf:NAME[:SPLIT[:CONFIG]]"
    parser.add_argument("--input", required=True, help=f"{paths}; or on the Hugging Face Hub: {on_hub}")
    parser.add_argument("--tokenizer", required=True, help="as data.tokenizer: a name, a file or a folder")
    parser.add_argument("--end_of_text", help="end-of-text token, if the files of the tokenizer do not name it")
    parser.add_argument("--out", action=PathFlag, required=True, help="folder of the store, also in a bucket")
    most = "tokens of --input to read, such as 2e9; the input after them is not fetched; default: all"
    parser.add_argument("--max_tokens", action=value_flag(Positive[float]), help=most)
    dtype = "dtype of files of raw ids, .bin without .idx, as nanoGPT writes them"
    parser.add_argument("--bin_dtype", choices=("uint16", "uint32"), help=dtype)
    parser.add_argument("--valid_input", help="separate validation text; no other documents are then held out")
    share = "share of documents held out (%(default)s)"
    parser.add_argument("--valid_fraction", action=value_flag(UnitHalfOpen), default=0.01, help=share)
    parser.add_argument("--text_field", default=Fields.text, help="field of JSON lines and tables (%(default)s)")
    parser.add_argument("--prompt_field", help="field that precedes each text; the loss does not count its tokens")
    parser.add_argument("--messages_field", help="field with a conversation; the loss counts the assistant's messages")
    date = "date that the chat template writes, such as 2026-01-31"
    parser.add_argument("--date", type=datetime.datetime.fromisoformat, help=date)
    parser.add_argument("--id_field", help="field whose value `difftx data show` prints with each document")
    workers = "number of processes; default: one per core"
    parser.add_argument("--workers", action=CountFlag, default=processors, help=workers)
    parser.add_argument("--shard_tokens", action=CountFlag, default=2**27, help="tokens per shard (%(default)s)")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop", help="for unreadable documents")
    add_extension_flag(parser)
    options = parser.parse_args(arguments)
    _check(options)
    prepare_process(options)
    require_writable(options.out)
    options.max_tokens = options.max_tokens and int(options.max_tokens)
    names = {field.name for field in dataclasses.fields(Job)}
    job = Job(
        fields=Fields(options.text_field, options.id_field, options.prompt_field, options.messages_field),
        skip_unreadable=options.on_error == "skip",
        **{name: value for name, value in vars(options).items() if name in names},
    )
    return prepare(job)


def _check(options: argparse.Namespace) -> None:
    """Raise `UserError` for invalid values, before anything is read or written."""
    if options.max_tokens is not None and options.max_tokens % 1:
        raise UserError(f"--max_tokens={options.max_tokens}: must be a whole number, such as 100000 or 2e9")
    if options.messages_field is not None and options.prompt_field is not None:
        raise UserError("--messages_field and --prompt_field are both set; a conversation has its own prompts")
    if options.date is not None and options.messages_field is None:
        raise UserError(f"--date={options.date:%Y-%m-%d}: only chat templates write dates; set --messages_field too")


def prepare(job: Job) -> int:
    """Prepare a store and print a summary. Return the exit code: 0, or 75 after a signal."""
    sources = _sources(job)
    states = input_states(sources)
    sources = with_states(sources, states)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        with Workers(job) as workers:
            description = describe(job, sources, states)
            with open_job(job, description) as owner:
                if owner is not None:
                    workers.encode_units(sources)
                    for name, state in input_states(sources).items():
                        if state != states[name]:
                            raise UserError(f"{name}: changed while it was read; run the same command again")
                    plan = assembly.make_plan(job, sources)
                    assembly.finish(job, description, plan, workers.write_shards(plan.shards), owner)
        _print_summary(job)
    except KeyboardInterrupt:
        print(f"stopped; the same command resumes from the finished files in {job.work}", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


def _sources(job: Job) -> list[Source]:
    sources: list[Source] = []
    for pattern, valid in ((job.valid_input, True), (job.input, False)):
        if pattern is not None:
            flag = "valid_input" if valid else "input"
            commit = None
            if pattern.startswith(hub.SCHEME):
                commit = pinned_commit(job, flag)
            elif is_below(job.out, path_of(f"--{flag}", pattern)):
                raise UserError(f"--out={job.out}: lies in the input {pattern}; choose a folder outside of it")
            found = sources_of(pattern, valid=valid, first_index=len(sources), commit=commit)
            sources += [each if valid else dataclasses.replace(each, max_tokens=job.max_tokens) for each in found]
    if any(source.kind in TOKEN_FILES for source in sources):
        ids = {"end_of_text": job.loaded_tokenizer.eot_token, "bin_dtype": job.bin_dtype}
        sources = [dataclasses.replace(each, **ids) for each in sources]
    if sources and job.fields.text != Fields.text and all(each.kind in ("texts", *TOKEN_FILES) for each in sources):
        file = sources[0].files[0]
        raise UserError(
            f"--text_field={job.fields.text}: {file} is read whole, without fields; give JSON lines or Parquet"
        )
    if len(sources) == 1 and sources[0].kind == "texts" and len(sources[0].files) == 1 and job.valid_fraction:
        text = f"{sources[0].files[0]}: a single text: its last {job.valid_fraction:.2%} is held out for validation"
        print(printable(text))
        whole = dataclasses.replace(sources[0], held_out=job.valid_fraction)
        valid_size = round(job.valid_fraction * whole.size)
        return [
            dataclasses.replace(whole, index=0, size=valid_size, valid=True),
            dataclasses.replace(whole, index=1, size=whole.size - valid_size),
        ]
    return sources


def _print_summary(job: Job) -> None:
    meta = read_meta(job.out)
    for split in SPLITS:
        counts = meta["splits"][split]
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes of "
            f"text in {len(counts['shards'])} shards; {counts['duplicates']:,} duplicates left out"
        )
    if meta["empty"] or meta["skipped"]:
        skipped = f"{meta['skipped']:,} unreadable ({assembly.SKIPPED} names them)"
        print(f"left out: {meta['empty']:,} empty documents, {skipped}")
    print(f"{job.out}: prepared with {meta['tokenizer']['name']}")


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt on the first signal. A second signal ends the process immediately."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt
