"""Export checkpoints during training, every `checkpoint.export_every_steps` steps."""

import json

from difftx.errors import RunError, UserError
from difftx.files import is_taken, make_folder, new_folder, remove_file, remove_folder, size_of, write_atomically
from difftx.interop import SHARD_MIB
from difftx.interop.fields import CONFIG
from difftx.interop.runs import check_representable, write_export
from difftx.json_files import read_json
from difftx.parallel.heartbeat import report_progress
from difftx.parallel.multihost import decide_on_primary
from difftx.storage.paths import is_bucket
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.checkpoint.reading import open_checkpoint
from difftx.training.run import Run

FOLDER = "exports"
RECORD = "checkpoint.json"  # File in an export that identifies the exported weights.


def check_run(run: Run) -> None:
    """Raise `UserError` if the config requests exports but the model cannot be exported."""
    if run.config.checkpoint.export_every_steps is not None:
        check_representable(run.config.model, "hf")


def exists(run: Run, step: int) -> bool:
    """Return whether the export of a step is complete and has the weights of the step's checkpoint.

    After a rewind, an older export of the same step has weights that the run has discarded. All processes must call
    this function.
    """
    out, checkpoint = run.workdir / FOLDER / str(step), run.workdir / "checkpoints" / str(step)

    def has_weights_of_checkpoint() -> bool:
        try:
            return is_taken(out, CONFIG) and read_json(out / RECORD) == {"weights": read_manifest(checkpoint).weights}
        except UserError:  # The export has no readable record.
            return False

    return decide_on_primary(has_weights_of_checkpoint)


def write(run: Run, step: int) -> str:
    """Export the checkpoint of a step to `<workdir>/exports/<step>`. All processes must call this function.

    Return a message for the log. If the export fails, the message says so, and the training continues.
    """
    run.owner.check()
    workdir = run.workdir if is_bucket(run.workdir) else run.workdir.absolute()

    def export() -> str:
        out = workdir / FOLDER / str(step)
        try:
            make_folder(out.parent)
            if size_of(out / RECORD) is not None:  # Written before a rewind, so it has other weights.
                remove_file(out / CONFIG)
                remove_folder(out)
            checkpoint = open_checkpoint(read_manifest(workdir / "checkpoints" / str(step)), run.config)
            # Report progress, so that the watchdog allows more time than for a step.
            with new_folder(out, CONFIG, after_each_upload=report_progress) as folder:
                write_atomically(folder / RECORD, json.dumps({"weights": checkpoint.weights}) + "\n")
                written, *_ = write_export(checkpoint, run.files, folder, str(out), "hf", SHARD_MIB * 2**20)
                run.owner.check()
                return f"{out}: {written}"
        except (OSError, UserError, RunError) as error:
            return f"not exported: {error}"

    return decide_on_primary(export)
