"""List, verify, compare and delete the checkpoints of a run: difftx checkpoint COMMAND --workdir=DIR."""

from collections.abc import Sequence

from difftx.commands.flags import CountFlag, Parser, PathFlag, add_extension_flag, prepare_process
from difftx.errors import UserError, printable
from difftx.files import UNLOCKED, list_folder


def main(arguments: Sequence[str]) -> int:
    """Run `checkpoint ls`, `verify`, `diff`, `quarantine` or `prune`."""
    parser = Parser("difftx checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "ls": "list the checkpoints of a run, and check the names and sizes of their files",
        "verify": "read every file and compare its checksum",
        "diff": "compare the configs and arrays of two checkpoints",
        "quarantine": "exclude a checkpoint, so that training resumes from the checkpoint before it",
        "prune": "delete the checkpoints that neither the run's config nor --keep keeps",
    }
    parsers = {name: commands.add_parser(name, help=text) for name, text in texts.items()}
    for command in parsers.values():
        command.add_argument("--workdir", action=PathFlag, required=True, help="directory of the run")
        add_extension_flag(command)
    parsers["diff"].add_argument("a", help="a step of --workdir, or the folder of a checkpoint")
    parsers["diff"].add_argument("b", help="another step or folder")
    parsers["diff"].add_argument("--values", action="store_true", help="also print the norm of each array's difference")
    parsers["quarantine"].add_argument("--step", type=int, required=True, help="step of the checkpoint")
    keep = "number of newest checkpoints to keep, and no others"
    parsers["prune"].add_argument("--keep", action=CountFlag, help=keep)
    parsers["prune"].add_argument("--yes", action="store_true", help="delete; without --yes, only print the names")
    options = parser.parse_args(arguments)
    prepare_process(options)
    folder = options.workdir / "checkpoints"
    if not list_folder(folder):
        raise UserError(f"--workdir={options.workdir}: no checkpoints there")

    # Imported after the flags are checked, because the imports are slow.
    from difftx.commands import checkpoint_actions as actions
    from difftx.training.checkpoint.manifest import MANIFEST
    from difftx.training.checkpoint.protocol import quarantine

    match options.command:
        case "ls":
            actions.list_checkpoints(folder)
        case "verify":
            actions.verify(folder)
        case "diff":
            actions.diff(actions.find(folder, options.a), actions.find(folder, options.b), options.values)
        case "quarantine":
            path = quarantine(UNLOCKED, actions.find(folder, str(options.step)))
            print(printable(f"{path}: to use the checkpoint again, rename this file to {MANIFEST}"))
        case "prune":
            actions.prune(options.workdir, options.keep, options.yes)
    return 0
