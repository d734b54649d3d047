"""Worker processes on this machine for `difftx prepare`."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from difftx.data.job import Job
from difftx.data.progress import Progress
from difftx.data.readers import Source
from difftx.data.shards import Shard, write_shard
from difftx.data.units import encode_unit, finished_units, units_to_do
from difftx.errors import UserError


class Workers:
    """A pool of processes. A context manager: what has begun at its end is finished, the rest is not."""

    def __init__(self, count: int, job: Job):
        """Start the processes; they load the tokenizer while the parent does."""
        self._count = count
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        for _ in range(count):
            self._pool.submit(_load_tokenizer, job)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode_units(self, job: Job, sources: Sequence[Source]) -> None:
        """Tokenise what is not tokenised yet; this process reads, the workers do the rest."""
        before = [state["done"]["input_bytes"] for source in sources for state in finished_units(job, source)[2]]
        with Progress(max(1, sum(source.size for source in sources)), sum(before)) as progress:
            for done in self._map(encode_unit, job, units_to_do(job, sources)):
                progress.advance(input_bytes=done.input_bytes, text_bytes=done.text_bytes, tokens=done.tokens)
                for problem in done.problems:
                    progress.say(f"left out: {problem}")

    def write_shards(self, job: Job, shards: Sequence[Shard]) -> None:
        """Write the shards that are not written yet."""
        for _ in self._map(write_shard, job, shards):
            pass

    def _map[Task, Result](
        self, function: Callable[[Job, Task], Result], job: Job, tasks: Iterable[Task]
    ) -> Iterator[Result]:
        """Yield results as they come; of several errors, the first in the order of the tasks is raised.

        No more than two tasks a worker are held in memory.
        """
        pending: list[concurrent.futures.Future[Result]] = []
        remaining = iter(tasks)
        try:
            while True:
                pending += (
                    self._pool.submit(function, job, task)
                    for task in itertools.islice(remaining, 2 * self._count - len(pending))
                )
                if not pending:
                    return
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                if any(future.exception() for future in done):
                    for future in pending:
                        future.result()
                pending = [future for future in pending if future not in done]
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, out of memory perhaps; run the same command with fewer --workers"
            ) from error


def _load_tokenizer(job: Job) -> None:
    # A tokenizer that is not there is for the parent to report.
    with contextlib.suppress(UserError):
        _ = job.encoding


def _start_worker() -> None:
    # Ctrl-C goes to the whole group: the parent decides, and the units at hand are finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A pool's workers would wait for ever for a parent that was killed.
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
