"""Compare what two commits compute, bit for bit, on this machine: python -m tests.golden.compare OLD NEW.

OLD and NEW are commits, or folders with a source tree. Both are measured by the driver of this source tree. Exit codes:
0 no difference, 1 differences, which are printed.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import records


def main() -> int:
    """Run the driver on both source trees and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="commit or folder")
    parser.add_argument("new", metavar="NEW", help="commit or folder")
    parser.add_argument("--parts", help="parts of the driver, such as training,data; all if not given")
    options = parser.parse_args()
    parts = [part for part in records.PARTS if not records.lacks_extra(part)]
    if options.parts:
        parts = options.parts.split(",")
    elif len(parts) < len(records.PARTS):
        print("not compared, as the extra eval is not installed: suites harness and math")
    with _source_tree(options.old) as old, _source_tree(options.new) as new:
        before, after = records.make_records([old, new], parts)
    found = records.differences(before, after, exact=True)
    if found:
        print(records.table(found))
    print(f"{options.old} → {options.new}: {len(found)} of {len(before | after)} values differ")
    return 1 if found else 0


@contextlib.contextmanager
def _source_tree(name: str) -> Iterator[Path]:
    """Yield the folder of that name, or a temporary work tree of the commit."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(records.ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="difftx-compare-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), name], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    sys.exit(main())
