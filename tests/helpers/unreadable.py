"""File modes that apply to root too, so that a file exists and cannot be read."""

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator

import pytest

# Without these capabilities, file modes apply to root too; see capabilities(7).
CAPABILITIES = {"dac_override": 1, "dac_read_search": 2}
LINUX_CAPABILITY_VERSION_3 = 0x20080522


@functools.cache
def setpriv_prefix() -> tuple[str, ...] | None:
    """Return a prefix of commands with which file modes apply to root too, or None if there is none."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", f"--bounding-set={','.join(f'-{name}' for name in CAPABILITIES)}")
    with contextlib.suppress(OSError):
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return None


@contextlib.contextmanager
def without_root_capabilities() -> Iterator[None]:
    """Apply file modes to root too, in this thread and in the threads that it starts in the block."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    effective = data[0]  # Bits of the capabilities 0 to 31.
    data[0] = effective & ~sum(1 << number for number in CAPABILITIES.values())
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        data[0] = effective
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


needs_unprivileged = pytest.mark.skipif(
    setpriv_prefix() is None, reason="root here, and setpriv cannot drop capabilities"
)
