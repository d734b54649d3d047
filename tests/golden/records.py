"""Records of the golden driver: making one, and comparing two."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from difftx import compilation_cache

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "golden.json"
FAST_PARTS = ("training",)  # Parts of the driver that `make test` runs.
SLOW_PARTS = ("data", "suites", "extras")  # Parts that `make test-long` runs.
SLOWEST_PARTS = ("variants", "more_suites")  # They take minutes, mostly to compile. `make test-exhaustive` runs them.
PARTS = FAST_PARTS + SLOW_PARTS + SLOWEST_PARTS
BITS = "bits:"  # As in driver.py.

# Relative to the recorded number, and to 1e-2 for smaller numbers. The losses need more than one operation's rounding,
# because steps of Adam amplify rounding: see README.md.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}

type Record = dict[str, Any]  # Path of a value, parts joined by "/" → a scalar or a list of scalars.
type Runner = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def make_records(roots: Sequence[Path], parts: Sequence[str]) -> list[Record]:
    """Run parts of the driver on source trees of difftx, two processes at a time. Return a record per tree.

    All processes use the user's compilation cache.

    Raises:
        RuntimeError: the driver fails.
    """
    compilation_cache.enable()
    with ThreadPoolExecutor(2) as pool:
        futures = [[pool.submit(make_record, root, part) for part in parts] for root in roots]
        return [{path: value for part in of_root for path, value in part.result().items()} for of_root in futures]


def make_record(root: Path, part: str, run: Runner | None = None) -> Record:
    """Run a part of the driver. `run` runs a script with its arguments; the default is a new interpreter."""

    def run_new(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [str(HERE / "driver.py"), f"--root={root}", f"--part={part}", f"--out={out}"]
        ended = (run or run_new)(command)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return dict(_flat(part, json.loads(out.read_text())))


def lacks_extra(part: str) -> bool:
    """Return whether a part needs packages of the extra "eval" that are not installed."""
    return part == "extras" and None in map(importlib.util.find_spec, ("lm_eval", "math_verify"))


def read_golden() -> tuple[list[dict[str, str]], Record]:
    """Return the log of renewals and the values of golden.json."""
    content = json.loads(GOLDEN.read_text())
    return content["log"], content["values"]


def write_golden(log: Sequence[dict[str, str]], values: Record) -> None:
    """Write golden.json, one line per value, without the hashes that are comparable on one machine only."""
    kept = {path: value for path, value in values.items() if not _is_bits(value)}
    lines = ",\n".join(f"{json.dumps(path)}: {json.dumps(kept[path])}" for path in sorted(kept))
    GOLDEN.write_text(f'{{"log": {json.dumps(list(log), indent=1)},\n"values": {{\n{lines}\n}}}}\n')


def differences(old: Record, new: Record, *, exact: bool) -> list[tuple[str, Any, Any]]:
    """Return path, old and new value of everything that differs.

    Args:
        old: record to compare with.
        new: record to judge.
        exact: floats must be equal, and so must hashes of floats. False: floats may differ by `TOLERANCES`.
    """
    found = []
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path, "(missing)"), new.get(path, "(missing)")
        if not exact and (_is_bits(before) or _is_bits(after)):
            continue
        tolerance = 0.0 if exact else TOLERANCES["bfloat16" if "bfloat16" in path else "float32"]
        if not _agree(before, after, tolerance):
            found.append((path, before, after))
    return found


def table(found: Sequence[tuple[str, Any, Any]]) -> str:
    """Return differences as text, three lines each."""
    return "\n".join(f"{path}\n  old {json.dumps(old)}\n  new {json.dumps(new)}" for path, old, new in found)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{path}/{name}", inner)
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}/{index}", inner)
    else:
        yield path, value


def _is_bits(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(inner, str) and inner.startswith(BITS) for inner in values)


def _agree(old: Any, new: Any, tolerance: float) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_agree(a, b, tolerance) for a, b in zip(old, new, strict=True))
    if type(old) is not type(new):
        return False
    if isinstance(old, float):
        return old == new or abs(old - new) <= tolerance * max(abs(old), 1e-2)
    return old == new
