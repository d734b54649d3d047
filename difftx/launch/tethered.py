"""Execute a command that receives SIGTERM when its parent process dies: tethered.py PARENT_PID PROGRAM ARG …

If a sweep is killed with SIGKILL, it cannot stop its run, and the next sweep would start a second process for the same
run. Linux's parent-death signal prevents this. A process must set the signal for itself. The setting survives exec. On
other systems, the lock of the workdir is the only protection.
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
        if os.getppid() != int(parent):  # The parent died before the signal was set.
            sys.exit(f"process {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
