"""Huge pages for the memory of a process.

XLA's CPU backend allocates the temporary buffers of a step at each step. With pages of 4 KiB, the kernel prepares tens
of thousands of pages each time, which takes a third of a step of the quickstart. Linux prepares 2 MiB at a time if a
process asks for it. glibc (2.35 and later) asks if the variable GLIBC_TUNABLES says so when the process starts.
"""

import os
import sys
from pathlib import Path

VARIABLE, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # Such as "always [madvise] never".


def restart_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages, where Linux grants them on request.

    The new process keeps the same process id. Call this before the process does any work. If the user has set
    GLIBC_TUNABLES, to any value, this function does nothing.
    """
    try:
        on_request = "[madvise]" in SETTING.read_text()
    except OSError:  # This is not Linux, or a kernel without huge pages.
        return
    if not on_request or VARIABLE in os.environ or not sys.executable:
        return
    os.environ[VARIABLE] = HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
