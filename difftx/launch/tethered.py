"""Execute a command that receives SIGTERM when this process's parent dies: tethered.py PARENT_PID PROGRAM ARG …

A sweep that is killed with SIGKILL cannot stop its run, which would then train at the same time as the next sweep's.
The parent-death signal of Linux prevents that. A process sets it for itself, and it survives exec. On other systems,
the lock of the workdir is the only protection.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Set the parent-death signal and execute the command."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # The parent died before the call, so no signal will come.
            sys.exit(f"process {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
