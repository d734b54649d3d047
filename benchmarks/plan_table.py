"""Does it fit? Every size of the paper compiled for TPU slices that are not here, as a table in docs/operations.md.

    python benchmarks/plan_table.py [--only=830m] [--out=runs/plan_table] [--write]

Needs libtpu (pip install 'difftx[tpu]'). Each row is one `difftx plan` in a process of its own, whose greatest memory
is measured; what --out already has is not compiled again. --write puts the table between its markers in
docs/operations.md. All rows take more than an hour on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- benchmarks/plan_table.py writes from here -->", "<!-- to here -->"

# Size → topologies. Mesh, remat policy and microbatches are those of difftx/parallel/presets.py.
TOPOLOGIES = {
    "830m": ["v5p:2x2x1", "v5e:4x4", "v5e:8x8"],
    "1.4b": ["v5p:2x2x1", "v5e:8x8"],
    "2.8b": ["v5p:2x2x2", "v5e:8x8", "v5e:8x8*2"],
    "6.8b": ["v5p:2x2x4", "v5e:8x16"],
    "13.1b": ["v5p:4x4x4", "v5e:16x16"],
    "table9": ["v5p:4x4x4", "v5e:16x16"],
}
COLUMNS = [
    "config",
    "topology",
    "mesh",
    "GiB a device",
    "fits",
    "sent GiB",
    "arithmetic",
    "MFU",
    "compiled",
    "host GiB",
]


def main() -> None:
    """Compile what is missing, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", choices=TOPOLOGIES, help="one size")
    parser.add_argument("--out", type=Path, default=Path("runs/plan_table"), help="where each row's numbers are kept")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/operations.md")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for size in [args.only] if args.only else TOPOLOGIES:
        for config, topology in rows(size):
            path = args.out / f"{name(config, topology)}.json"
            if not path.exists():
                print(f"{config} on {topology} …", file=sys.stderr, flush=True)
                measured = measure(config, topology, path.with_suffix(".plan"))
                path.with_suffix(".part").write_text(json.dumps(measured, indent=2) + "\n")
                path.with_suffix(".part").rename(path)
    found = {
        (config, topology): json.loads(path.read_text())
        for size in TOPOLOGIES
        for config, topology in rows(size)
        if (path := args.out / f"{name(config, topology)}.json").exists()
    }
    table = format_table(found)
    print(table)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}")


def rows(size: str) -> Iterator[tuple[str, str]]:
    """Yield the configs and topologies of a size, for both architectures."""
    for topology in TOPOLOGIES[size]:
        for architecture in ("diff", "transformer"):
            file = f"diff_3b.py:{architecture}" if size == "table9" else f"scaling.py:{architecture}-{size}"
            yield f"configs/{file}", topology


def name(config: str, topology: str) -> str:
    """Return a file name for a row."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{Path(config).name}_{topology}")


def measure(config: str, topology: str, path: Path) -> dict[str, Any]:
    """Run `difftx plan`; return its numbers, or its one line of error, with the process's memory and time."""
    command = [sys.executable, "-m", "difftx", "plan", f"--config={config}", f"--topology={topology}", f"--json={path}"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--config.mesh.preset=auto"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{error}")
    numbers = json.loads(path.read_text())[0] if path.exists() else {}
    path.unlink(missing_ok=True)
    return {
        **numbers,
        "error": error.strip(),
        "process_seconds": time.perf_counter() - start,
        "host_bytes": 1024 * usage.ru_maxrss,
    }


def format_table(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(*key, numbers)) + " |" for key, numbers in found.items()]
    return "\n".join(lines) + "\n"


def cells(config: str, topology: str, numbers: dict[str, Any]) -> list[str]:
    """Return one row's cells; a program that libtpu refused has only its line of error."""
    shown = [Path(config).name.replace(".py", ""), topology]
    tail = [f"{numbers['process_seconds']:.0f} s", f"{numbers['host_bytes'] / 2**30:.1f}"]
    if "mesh" not in numbers:
        return [*shown, "", "", numbers["error"].partition(": ")[2], "", "", "", *tail]
    mesh = " ".join(f"{axis}={size}" for axis, size in numbers["mesh"].items() if size > 1)
    sent = sum(c["interconnect_bytes"] + c["network_bytes"] for c in numbers["collectives"].values())
    over = numbers["needed_bytes"] - numbers["capacity_bytes"]
    return [
        *shown,
        f"{mesh} remat={numbers['remat']}" + f" accumulation={numbers['accumulation']}" * (numbers["accumulation"] > 1),
        f"{numbers['needed_bytes'] / 2**30:.1f} of {numbers['capacity_bytes'] / 2**30:.1f}",
        "yes" if numbers["fits"] else f"no, {over / 2**30:.1f} too much",
        f"{sent / 2**30:.1f}",
        f"{numbers['arithmetic_seconds']:.2f} s",
        f"≤ {numbers['mfu_causal']:.0%}",
        *tail,
    ]


if __name__ == "__main__":
    main()
