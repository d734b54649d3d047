"""Local worker processes for `difftx prepare`."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Source
from difftx.data.prepare.shards import Shard, write_shard
from difftx.data.prepare.units import encode_unit, finished_units, units_to_do
from difftx.errors import UserError
from difftx.progress import Work


class Workers:
    """A context manager for a pool of worker processes. On exit, it finishes running tasks and cancels waiting ones."""

    def __init__(self, job: Job):
        """Start `job.workers` processes, which load the tokenizer at the same time as the parent."""
        self._job = job
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(job.workers, context, initializer=_start_worker)
        for _ in range(job.workers):
            self._pool.submit(_load_tokenizer, job)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode_units(self, sources: Sequence[Source]) -> None:
        """Tokenise the units that have no file yet: this process reads them, and the workers do the rest."""
        before = [summary.input_bytes for source in sources for summary in finished_units(self._job, source)]
        size = max(1, sum(source.size for source in sources))
        line = f"{{share:.0%}} of {size / 1e6:,.1f} MB, {{text}}, {{seconds:,.0f}} s left"
        text_bytes, tokens, start = 0, 0, time.monotonic()
        with Work() as work, work.task("tokenising", size, done=sum(before), line=line) as advance:
            for done in self._map(encode_unit, units_to_do(self._job, sources)):
                text_bytes += done.text_bytes
                tokens += done.tokens
                seconds = max(time.monotonic() - start, 1e-9)
                advance(done.input_bytes, f"{text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds:,.0f} tokens/s")
                for problem in done.problems:
                    work.note(f"left out: {problem}")

    def write_shards(self, shards: Sequence[Shard]) -> None:
        """Write the shards that are not written yet."""
        for _ in self._map(write_shard, shards):
            pass

    def _map[Task, Result](self, function: Callable[[Job, Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results as tasks complete; if several tasks fail, raise the error of the earliest submitted one.

        At most two tasks per worker are held in memory.
        """
        pending: list[concurrent.futures.Future[Result]] = []
        remaining = iter(tasks)
        try:
            while True:
                for task in itertools.islice(remaining, 2 * self._job.workers - len(pending)):
                    pending.append(self._pool.submit(function, self._job, task))
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
    # The parent reports the error of a tokenizer that cannot be loaded.
    with contextlib.suppress(UserError):
        _ = job.encoding


def _start_worker() -> None:
    # Ctrl-C signals the whole process group. Only the parent reacts, so that workers finish their current units.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Without this thread, workers would wait forever after their parent was killed.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
