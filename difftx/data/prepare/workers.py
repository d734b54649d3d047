"""Workers of `difftx prepare`: processes on this machine."""

import collections
import concurrent.futures
import contextlib
import math
import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from difftx.data.prepare.assembly import Shard, encode_unit, finished_units, units_to_do, write_shard
from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Source, Unit
from difftx.errors import UserError
from difftx.progress import Work


class Workers(contextlib.AbstractContextManager):
    """A pool of local processes. On exit, wait for the running tasks and cancel the rest."""

    def __init__(self, job: Job):
        self._job = job
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(job.workers, context, initializer=_start_worker)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode_units(self, sources: Sequence[Source]) -> None:
        """Tokenise the units that have no file yet. This process reads them, and the workers tokenise them."""
        finished = finished_units(self._job, sources)
        most = self._job.max_tokens
        limit = math.inf if most is None else most
        size = most or max(1, sum(source.size for source in sources))
        what = f"{size / 1e6:,.1f} MB" if most is None else f"{size:,} tokens"
        line = f"{{share:.0%}} of {what}, {{text}}, {{seconds:,.0f}} s left"
        training = {source.index for source in sources if not source.valid}
        counted = 0  # Number of tokens in finished training units, in input order.

        def units() -> Iterator[Unit]:
            nonlocal counted
            for source in sources:  # Validation sources come first.
                counted += sum(done.tokens for done in finished[source.index] if not source.valid)
                if counted >= limit:
                    return
                for unit in units_to_do(self._job, [source], finished):
                    yield unit
                    if counted >= limit:
                        return

        def room() -> float:
            # A unit has at most about `unit_bytes` tokens, so all units in progress are needed to reach the limit.
            return (limit - counted) / sources[-1].unit_bytes

        amount = operator.attrgetter("input_bytes" if most is None else "tokens")
        before = sum(amount(done) for summaries in finished.values() for done in summaries)
        text_bytes, tokens, start = 0, 0, time.monotonic()
        with Work() as work, work.task("tokenising", size, done=before, line=line) as advance:
            for done in self._map(encode_unit, units(), room):
                text_bytes += done.text_bytes
                tokens += done.tokens
                counted += done.tokens * (done.source in training)
                seconds = max(time.monotonic() - start, 1e-9)
                advance(amount(done), f"{text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds:,.0f} tokens/s")
                for problem in done.problems:
                    work.note(f"left out: {problem}")

    def write_shards(self, shards: Sequence[Shard]) -> list[dict[str, Any]]:
        """Write all shards. Return the entry of each for `meta.json`."""
        return list(self._map(write_shard, shards))

    def _map[Task, Result](
        self,
        function: Callable[[Job, Task], Result],
        tasks: Iterable[Task],
        room: Callable[[], float] = lambda: math.inf,
    ) -> Iterator[Result]:
        """Yield the results in task order, and raise the error of the first task that failed.

        Read the next task when fewer than `room()` tasks are in progress.
        """
        pending: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(function, self._job, task))
                # A task may hold a whole unit of text, so keep at most two tasks per worker in memory.
                while pending and len(pending) >= min(2 * self._job.workers, room()):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, out of memory perhaps; run the same command with fewer --workers"
            ) from error


def _start_worker() -> None:
    # Ctrl-C and a closed terminal signal the whole process group. Workers ignore the signal and finish their current
    # task; only the parent reacts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Without this thread, workers would wait forever after their parent was killed.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
