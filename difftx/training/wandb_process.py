"""The process that sends the metrics of a run to Weights & Biases, started by `trackers.py`.

The first line of standard input has the options of `wandb.init` and "check", as a JSON object. Further lines are
`[step, {name: number}]`, and `null` is the end of the attempt. If the process fails, it prints the reason in one line.
It ignores the signals that stop a training, because the last rows follow them.
"""

import json
import os
import signal
import sys
import time
from typing import Any

FINISH_SECONDS = 10  # Time to send the last rows. The training waits for it.
RETRY_SECONDS = 60


def main() -> int:
    """Send the rows, or only check the options. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answer, parent = os.fdopen(os.dup(1), "w"), os.getppid()
    os.dup2(2, 1)  # wandb prints to standard output.
    try:
        import wandb

        options = json.loads(sys.stdin.readline())
        if options.pop("check"):  # Neither ask for a key nor connect to the service.
            wandb.Settings(project=options["project"])
            wandb.login(verify=False)
        else:
            send(wandb, options, parent)
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=answer, flush=True)
        return 1
    return 0


def send(wandb: Any, options: dict[str, Any], parent: int) -> None:
    """Send the rows. During an outage, try to begin until `parent` has ended."""
    row: Any = []
    while True:
        try:
            run = wandb.init(**options)
            break
        except wandb.errors.CommError as error:
            if os.getppid() != parent:
                raise
            why = " ".join(str(error).split())
            print(f"wandb: {why}; trying again in {RETRY_SECONDS} s", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)
    for line in sys.stdin:
        if (row := json.loads(line)) is not None:
            run.log(row[1], step=row[0])
    signal.alarm(2 * FINISH_SECONDS)  # The training may have been killed, and does not wait.
    run.finish(exit_code=int(row is not None))  # Without the end of the attempt, the run counts as failed.


if __name__ == "__main__":
    os._exit(main())  # Skip wandb's exit handlers, which may wait or fail.
