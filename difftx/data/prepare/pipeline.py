"""The pipeline of `difftx prepare`: tokenise the input in units, then assemble the units into the shards of a store.

If the pipeline is stopped or killed, running it again resumes from the finished files. The bytes of the store depend on
the input and the options alone.
"""

import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftx.data.prepare.beam import BeamWorkers
from difftx.data.prepare.job import Job, describe, input_states, open_job
from difftx.data.prepare.readers import Source, sources_of
from difftx.data.prepare.shards import SKIPPED, discard_corrupt_shards, finish, make_plan
from difftx.data.prepare.units import discard_corrupt_units
from difftx.data.prepare.workers import Workers
from difftx.data.store import SPLITS, read_meta
from difftx.errors import EXIT_PREEMPTED, RunError, UserError

LOCAL = "local"


def prepare(job: Job) -> int:
    """Prepare a store, print a summary of its contents, and return the exit code."""
    sources = _sources(job)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        with Workers(job) if job.runner == LOCAL else BeamWorkers(job) as workers:
            description = describe(job, sources)
            with open_job(job, description, sources) as unfinished:
                if unfinished:
                    _write_store(job, sources, description, workers)
        _print_summary(job)
    except KeyboardInterrupt:
        print(f"stopped; the same command resumes from the finished files in {job.work}", file=sys.stderr)
        return EXIT_PREEMPTED
    except MemoryError as error:
        raise RunError("out of memory; run the same command with fewer --workers, or split long documents") from error
    except OSError as error:
        if error.errno is not None:  # Errors of write calls do not name a file.
            error.filename = error.filename or str(job.out)
        raise
    return 0


def _sources(job: Job) -> list[Source]:
    sources: list[Source] = []
    for pattern, valid in ((job.valid_input, True), (job.input, False)):
        if pattern is not None:
            if job.out.resolve().is_relative_to(Path(pattern).resolve()):
                raise UserError(f"--out={job.out}: lies in the input {pattern}; choose a folder outside of it")
            sources += sources_of(pattern, valid=valid, first_index=len(sources))
    if len(sources) == 1 and sources[0].kind == "texts" and len(sources[0].files) == 1 and job.valid_fraction:
        print(f"{sources[0].files[0]}: a single text: its last {job.valid_fraction:.2%} is held out for validation")
        return _split_in_two(sources[0], job.valid_fraction)
    return sources


def _split_in_two(source: Source, held_out: float) -> list[Source]:
    """Split a source that is one text file into a validation source and a training source."""
    valid_size = round(held_out * source.size)
    return [
        dataclasses.replace(source, index=0, size=valid_size, valid=True, held_out=held_out),
        dataclasses.replace(source, index=1, size=source.size - valid_size, valid=False, held_out=held_out),
    ]


def _write_store(
    job: Job, sources: Sequence[Source], description: dict[str, Any], workers: Workers | BeamWorkers
) -> None:
    states = input_states(sources)
    for line in (*discard_corrupt_units(job), *discard_corrupt_shards(job)):
        print(line, file=sys.stderr)
    workers.encode_units(sources)
    for name, state in input_states(sources).items():
        if state != states[name]:
            raise UserError(f"{name}: changed while it was read; run the same command again")
    plan = make_plan(job, sources)
    workers.write_shards(plan.shards)
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
