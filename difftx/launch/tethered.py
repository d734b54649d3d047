"""Become another command, which gets SIGTERM when this process's parent dies: tethered.py PARENT_PID PROGRAM ARG …

A sweep that is killed outright cannot stop its run, which would go on beside the one that the next sweep starts. The
setting has to be made in the child itself and outlives exec. Only Linux has it; elsewhere the workdir's lock remains.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Tie this process to its parent and execute the command."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # It died first, and there will be no signal.
            sys.exit(f"process {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
