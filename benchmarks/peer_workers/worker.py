"""Worker side of the line protocol of benchmarks/peers.py. It imports only the standard library.

A worker trains one model. It gets its task as JSON in its only argument, prints a line of JSON when the first step is
done, and then answers each line of its standard input by one line of JSON.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable


class Task:
    """The task that benchmarks/peers.py gives to a worker: the fields of the JSON object in the worker's argument."""

    def __init__(self):
        for name, value in json.loads(sys.argv[1]).items():
            setattr(self, name, value)


def serve(
    train: Callable[[int], object],
    generate: Callable[[int, int], object] | None,
    parameters: int,
    device_peak_bytes: Callable[[], int] | None = None,
) -> None:
    """Take the first step, then do what the parent asks for: `train STEPS`, `generate PROMPT NEW`, or `memory`.

    `train` returns after the last of its steps is done, and `generate` after the last of NEW tokens that follow a
    prompt of PROMPT tokens. `device_peak_bytes` returns the peak memory of the GPU, if there is one.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not mix with the answers.

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    train(1)
    answer(parameters=parameters, generates=generate is not None)
    for line in sys.stdin:
        verb, *counts = line.split()
        if verb == "memory":
            resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer(peak_bytes=device_peak_bytes() if device_peak_bytes else resident)
            continue
        work = {"train": train, "generate": generate}[verb]
        assert work is not None
        began = time.perf_counter()
        work(*map(int, counts))
        answer(seconds=time.perf_counter() - began)
