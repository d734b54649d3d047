"""Files that exist and cannot be read: permissions that count for root too, and read errors of the file system."""

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

# Without them root is refused like any other user; see capabilities(7).
CAPABILITIES = {"dac_override": 1, "dac_read_search": 2}
LINUX_CAPABILITY_VERSION_3 = 0x20080522
SOURCE = Path(__file__).with_name("failing_reads.c")


@functools.cache
def as_other_users() -> tuple[str, ...] | None:
    """Return what to put before a command so that file modes count for it; None if this machine cannot do that."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", f"--bounding-set={','.join(f'-{name}' for name in CAPABILITIES)}")
    with contextlib.suppress(OSError):
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return None


@contextlib.contextmanager
def modes_count() -> Iterator[None]:
    """Let file modes count in this thread, and in the threads that it starts in the block, for root too."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    effective = data[0]  # Of capabilities 0 to 31.
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
        """Let the next reads of files whose path contains `part` fail: EIO while reading, ESTALE while opening."""
        with self.control.open("r+b") as file:  # In place: it is mapped.
            file.write(struct.pack("=ii1024s", number, times, part.encode()))

    def stop(self) -> int:
        """Let reads succeed again; return how many more would have failed."""
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
    """Return read errors controlled by a file in `folder`, off at first; None if there is no C compiler."""
    library = _library()
    if library is None:
        return None
    reads = FailingReads(library, folder / "failing_reads")
    reads.control.touch()
    reads.fail(0, "", 0)
    return reads


needs_modes = pytest.mark.skipif(as_other_users() is None, reason="root here, and setpriv cannot drop capabilities")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: read errors cannot be made")
