"""Apache Beam pipelines that run `difftx prepare` on many machines.

Every machine must have difftx installed and must see the input and --out under the same paths (NFS, or a mounted
bucket). This process waits for the pipelines. Between them, it assigns documents to shards.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Source
from difftx.data.prepare.shards import Shard, write_shard
from difftx.data.prepare.units import encode_unit, units_to_do
from difftx.errors import UserError, import_extra


class BeamWorkers:
    """A context manager with the interface of `difftx.data.prepare.workers.Workers` that runs the work on Beam."""

    def __init__(self, job: Job):
        self._job, self._beam = job, import_extra("apache_beam", "beam")
        name = job.runner if job.runner.lower().endswith("runner") else f"{job.runner}Runner"
        self._options = [f"--runner={name}", *shlex.split(job.runner_options)]
        try:
            self._beam.runners.create_runner(name)
        except ValueError as error:
            raise UserError(f"--runner={job.runner}: {error}") from error

    def __enter__(self) -> "BeamWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode_units(self, sources: Sequence[Source]) -> None:
        """Tokenise the units that have no file yet: one reader per source, and units spread over all machines."""
        beam, job = self._beam, self._job
        read = beam.FlatMap(lambda source: units_to_do(job, [source]))
        self._run(sources, read, beam.Reshuffle(), beam.Map(lambda unit: encode_unit(job, unit)))

    def write_shards(self, shards: Sequence[Shard]) -> None:
        """Write the shards that are not written yet."""
        job = self._job
        self._run(shards, self._beam.Map(lambda shard: write_shard(job, shard)))

    def _run(self, elements: Sequence[Any], *steps: Any) -> None:
        beam = self._beam
        try:
            options = beam.options.pipeline_options.PipelineOptions(self._options)
            with beam.Pipeline(options=options) as pipeline:
                values = pipeline | beam.Create(list(elements)) | "Spread" >> beam.Reshuffle()
                for number, step in enumerate(steps):
                    values = values | f"Step {number}" >> step
        except Exception as error:
            # Beam appends the step's name to the message of a worker's exception. An exception of another process
            # arrives as text within one of Beam's own exceptions.
            text = f"UserError: {error}" if isinstance(error, UserError) else str(error)
            if reason := re.search(r"UserError: (.+?)(?: \[while running|$)", text, re.MULTILINE):
                raise UserError(reason[1]) from error
            raise
