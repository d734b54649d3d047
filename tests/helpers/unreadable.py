"""Files that exist and cannot be read: file modes that apply to root too, and read errors of the file system."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Without these capabilities, file modes apply to root too; see capabilities(7).
CAPABILITIES = {"dac_override": 1, "dac_read_search": 2}
LINUX_CAPABILITY_VERSION_3 = 0x20080522
SOURCE = Path(__file__).with_name("failing_reads.c")


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


@dataclasses.dataclass
class FailingReads:
    """Read errors in processes that are started with `environment`."""

    library: Path
    control: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "FAILING_READS": str(self.control)}

    def fail(self, number: int, part: str, times: int = 2**31 - 1) -> None:
        """Make the next `times` reads of files whose path contains `part` fail with an errno, such as EIO.

        With ESTALE, opening the files fails too.
        """
        with self.control.open("r+b") as file:  # Written in place, because processes have mapped the file.
            file.write(struct.pack("=ii1024s", number, times, part.encode()))

    def stop(self) -> int:
        """Let reads succeed again, and return the number of failures that were left."""
        left = struct.unpack_from("=ii", self.control.read_bytes())[1]
        self.fail(0, "", 0)
        return left


@functools.cache
def _library() -> Path | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(tempfile.mkdtemp(prefix="difftx-tests-")) / "failing_reads.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def failing_reads(folder: Path) -> FailingReads | None:
    """Return read errors that a file in `folder` controls, disabled at first, or None if there is no C compiler."""
    library = _library()
    if library is None:
        return None
    reads = FailingReads(library, folder / "failing_reads")
    reads.control.touch()
    reads.fail(0, "", 0)
    return reads


needs_unprivileged = pytest.mark.skipif(
    setpriv_prefix() is None, reason="root here, and setpriv cannot drop capabilities"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: read errors cannot be made")
