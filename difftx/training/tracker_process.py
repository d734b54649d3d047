"""A separate process that sends the metrics of a run to a tracker's package. `trackers.py` starts it.

The first line on standard input has the options, as a JSON object. The following lines are `[step, {name: number}]`, in
the order of the steps, from the first step of the run. A line `null` marks the end of the attempt. If the process
fails, it prints the reason in one line. It ignores the signals that stop a training, because the last rows arrive after
them.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

FINISH_SECONDS = 10  # Time to send the last rows. The training waits for it.

type Options = dict[str, Any]
# Three values: the first step that the tracker does not have yet; `log(step, numbers)`, which sends a row; and
# `finish(ended)`, which ends the tracker's run and gets whether the attempt has ended properly.
type Started = tuple[int, Callable[[int, dict[str, float]], object], Callable[[bool], object]]


def main() -> int:
    """Send the rows, or only check the options if these say so. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The packages print to standard output.
    try:
        options = json.loads(sys.stdin.readline())
        started = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}[options["package"]](options)
        if started is not None:
            send(*started)
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=answer, flush=True)
        return 1
    return 0


def send(next_step: int, log: Callable[[int, dict[str, float]], object], finish: Callable[[bool], object]) -> None:
    """Send the rows from `next_step` on, then finish."""
    row: Any = []
    for line in sys.stdin:
        if (row := json.loads(line)) is not None and row[0] >= next_step:
            log(*row)
    signal.alarm(2 * FINISH_SECONDS)  # The training may have been killed, so nobody else enforces a timeout.
    finish(row is None)  # If the line `null` is missing, the run counts as failed.


def _wandb(options: Options) -> Started | None:
    import wandb

    if options["check"]:  # Do not ask for a key or connect to the service.
        wandb.Settings(project=options["project"])
        wandb.login(verify=False)
        return None
    run = wandb.init(
        **{key: options[key] for key in ("project", "id", "name", "group", "config", "dir")},
        resume="allow",
        settings={"console": "off", "x_stats_pid": options["pid"]},
    )
    return run.step, lambda step, row: run.log(row, step=step), lambda is_end: run.finish(exit_code=int(not is_end))


def _trackio(options: Options) -> Started | None:
    import trackio

    if options["check"]:
        return None
    # Trackio identifies a run by its name.
    run: Any = trackio.init(
        options["project"],
        name=f"{options['name']}-{options['id']}",
        group=options["group"],
        config=options["config"],
        resume="allow",
        embed=False,
    )
    return run._next_step, lambda step, row: run.log(row, step=step), lambda _: trackio.finish()


def _mlflow(options: Options) -> Started | None:
    import mlflow

    if options["check"]:
        return None
    experiment = mlflow.set_experiment(options["project"]).experiment_id
    found = mlflow.search_runs([experiment], f"tags.difftx = '{options['id']}'", output_format="list")
    next_step = 0
    if found:
        run_id = mlflow.start_run(found[0].info.run_id).info.run_id
        losses = mlflow.MlflowClient().get_metric_history(run_id, "train/loss")
        next_step = 1 + max((loss.step for loss in losses), default=-1)
    else:
        tags = {"difftx": options["id"], "difftx.group": options["group"]}
        mlflow.start_run(run_name=options["name"], tags=tags)
        groups = {name: group if isinstance(group, dict) else {"": group} for name, group in options["config"].items()}
        mlflow.log_params({f"{name}.{key}": value for name, group in groups.items() for key, value in group.items()})
    finish = lambda is_end: mlflow.end_run("FINISHED" if is_end else "FAILED")  # noqa: E731
    return next_step, lambda step, row: mlflow.log_metrics(row, step), finish


if __name__ == "__main__":
    os._exit(main())  # Skip the packages' exit handlers, because they may hang or fail.
