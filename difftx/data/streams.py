"""Input files that may be compressed, and the limit on the size of a document."""

import gzip
import lzma
import sys
import zlib
from pathlib import Path
from typing import BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OPENERS = {".gz": gzip.open, ".zst": zstd.open, ".xz": lzma.open}
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)
LONGEST_DOCUMENT = 2**30  # Bytes of a line or text file, decompressed. Each document is tokenised in one call.
TOO_LONG = f"is longer than the {LONGEST_DOCUMENT:,} bytes that a document may have; split it"


def open_stream(file: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if its suffix is .gz, .zst or .xz."""
    return cast(BinaryIO, OPENERS.get(file.suffix, open)(file, "rb"))


def why_unreadable(file: Path, error: BaseException) -> str:
    """Return a message that names a file and the problem that one of `READ_ERRORS` reports."""
    if isinstance(error, OSError) and error.strerror:
        return f"{file}: cannot be read ({error.strerror})"
    how = "truncated" if isinstance(error, EOFError) else "corrupt"
    return f"{file}: the compressed file is {how} ({error})"
