"""Tables of docs/fit.md: memory and time of the paper's models, compiled for TPU slices that are not attached.

    python benchmarks/plan_table.py [--only=830m] [--out=runs/plan_table] [--write] [--config.path.to.field=value …]

Needs libtpu and JAX's CUDA plugin (pip install -e '.[tpu,cuda]'). For each row, one `difftx plan` runs in its own
process, whose peak memory is measured. Rows whose numbers exist in --out are not compiled again. The script prints the
tables in Markdown; --write also replaces the tables between their markers in docs/fit.md. Rows without numbers are left
out. Compiling all rows takes more than an hour on two cores.

--only=long compiles the 3B models with rows of up to 64K tokens. A microbatch then has one row of tokens per group of
`mesh.context` devices.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from difftx.launch.topology import GPUS, parse_topology

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fit.md"

PRESET = "--config.mesh.preset=auto"
# A training measures the kernels and selects the fastest. The tables assume that it is difftx's own kernel on TPUs.
TPU_KERNEL = "--config.model.attention_implementation=pallas_tpu"
# Size → topologies. Mesh, remat policy and microbatches come from difftx/parallel/presets.py.
TOPOLOGIES = {
    "830m": ["v5p:2x2x1", "v5e:4x4", "v5e:8x8"],
    "1.4b": ["v5p:2x2x1", "v5e:8x8"],
    "2.8b": ["v5p:2x2x2", "v5e:8x8", "v5e:8x8*2", "v6e:8x8", "a100:8", "h100:8", "b200:8"],
    "6.8b": ["v5p:2x2x4", "v5e:8x16"],
    "13.1b": ["v5p:4x4x4", "v5e:16x16"],
    "table9": ["v5p:4x4x4", "v5e:16x16"],
}
# Table of long rows: their lengths in tokens, and the slice and mesh they are compiled for, 16 groups of four devices.
LONG = "long"
LENGTHS = (8192, 16_384, 32_768, 65_536)
UPDATE_TOKENS = 4_194_304  # Tokens per update of configs/long_context.py.
LONG_TOPOLOGY = "v5p:4x4x4"
LONG_MESH = {"mesh.fsdp": 16, "mesh.context": 4, "mesh.context_method": "zigzag"}
# The smallest slice on which rows of the greatest length fit. A microbatch is one row on the whole slice.
SMALLEST_TOPOLOGY = "v5p:2x2x1"
SMALLEST_MESH = {"mesh.fsdp": 1, "mesh.context": 4, "mesh.context_method": "zigzag"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: the arguments of one call of `difftx plan`."""

    config: str
    topology: str
    flags: tuple[str, ...] = (PRESET,)

    @property
    def name(self) -> str:
        """Name of the file with the row's numbers, without suffix."""
        flags = "".join(flag.replace("--config.", "_") for flag in self.flags if "preset=auto" not in flag)
        return "".join(
            c if c.isalnum() or c in ".-=" else "_" for c in f"{Path(self.config).name}_{self.topology}{flags}"
        )


def main() -> None:
    """Compile the missing rows and print the tables; with --write, also write them to docs/fit.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", choices=[*TOPOLOGIES, LONG], help="one size, or long rows")
    parser.add_argument("--out", type=Path, default=Path("runs/plan_table"), help="where each row's numbers are kept")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/fit.md")
    parser.epilog = "--config.path.to.field=value changes a field in long rows"
    args, rest = parser.parse_known_args()
    if wrong := [flag for flag in rest if not flag.startswith("--config.")]:
        parser.error(f"{wrong[0]} is not understood")
    args.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, tuple[list[Row], Callable[[dict[Row, Any]], str]]] = {
        "sizes": ([row for size in TOPOLOGIES for row in rows(size)], format_table),
        LONG: (list(long_rows(rest)), format_long_table),
    }
    wanted = [LONG] if args.only == LONG else ["sizes"] if args.only else list(tables)
    for table in wanted:
        all_rows, format_rows = tables[table]
        compile_missing(all_rows if args.only in (None, LONG) else rows(args.only), args.out)
        found = {
            row: json.loads(path.read_text()) for row in all_rows if (path := args.out / f"{row.name}.json").exists()
        }
        text = format_rows(found)
        print(text)
        if args.write:
            write_to_page(table, text)


def compile_missing(wanted: Iterable[Row], out: Path) -> None:
    """Compile the rows that have no numbers in `out`, and write their numbers there."""
    for row in wanted:
        path = out / f"{row.name}.json"
        if not path.exists():
            print(f"{row.name} …", file=sys.stderr, flush=True)
            measured = measure(row, path.with_suffix(".plan"))
            path.with_suffix(".part").write_text(json.dumps(measured, indent=2) + "\n")
            path.with_suffix(".part").rename(path)


def write_to_page(table: str, text: str) -> None:
    """Write a table between its markers in docs/fit.md."""
    begin = f"<!-- benchmarks/plan_table.py writes {table} from here -->"
    end = "<!-- to here -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def rows(size: str) -> Iterator[Row]:
    """Yield the rows of a size: each of its topologies with both architectures."""
    for topology in TOPOLOGIES[size]:
        for architecture in ("diff", "transformer"):
            file = f"diff_3b.py:{architecture}" if size == "table9" else f"scaling.py:{architecture}-{size}"
            has_tpu_kernel = architecture == "diff" and parse_topology(topology).kind not in GPUS
            yield Row(f"configs/{file}", topology, (PRESET, TPU_KERNEL) if has_tpu_kernel else (PRESET,))


def long_rows(overrides: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of long_context.py: each length, and the greatest one with other context methods and settings."""
    longest = LENGTHS[-1]
    for length in LENGTHS:
        yield long_row("diff", LONG_TOPOLOGY, LONG_MESH, length, overrides)
    for method in ("heads", "gather"):
        yield long_row("diff", LONG_TOPOLOGY, LONG_MESH | {"mesh.context_method": method}, longest, overrides)
    yield long_row("transformer", LONG_TOPOLOGY, LONG_MESH, longest, overrides)
    yield long_row("diff", SMALLEST_TOPOLOGY, SMALLEST_MESH, longest, overrides)
    yield long_row("diff", SMALLEST_TOPOLOGY, SMALLEST_MESH | {"model.remat": "offload"}, longest, overrides)


def long_row(architecture: str, topology: str, fields: dict[str, Any], length: int, overrides: Sequence[str]) -> Row:
    """Return one row of `long_rows`.

    All have the same tokens per update, in microbatches of one row of tokens per group of `mesh.context` devices.
    """
    config = f"configs/long_context.py:{architecture}"
    microbatches = UPDATE_TOKENS // (length * fields["mesh.fsdp"])
    fields = fields | {"data.sequence_length": length, "train.accumulation": microbatches}
    kernel = (TPU_KERNEL,) if architecture == "diff" else ()
    return Row(config, topology, (*(f"--config.{name}={value}" for name, value in fields.items()), *kernel, *overrides))


def measure(row: Row, path: Path) -> dict[str, Any]:
    """Run `difftx plan`. Return its numbers, if any, its error message, and the time and peak memory of its process."""
    command = [sys.executable, "-m", "difftx", "plan", f"--config={row.config}", f"--topology={row.topology}"]
    command += [f"--json={path}", *row.flags]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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


PLAN_COLUMNS = ["GiB per device", "fits", "sent GiB", "arithmetic", "MFU"]
COLUMNS = ["config", "topology", "mesh", *PLAN_COLUMNS, "compiled", "host GiB"]
LENGTH_COLUMNS = ["over context", "tokens per row", "microbatches", "temporaries GiB", "growth"]
LONG_COLUMNS = ["config", "topology", "mesh", *LENGTH_COLUMNS, *PLAN_COLUMNS]


def format_table(found: dict[Row, dict[str, Any]]) -> str:
    """Return the table of sizes in Markdown."""
    return _markdown(COLUMNS, [cells(row, numbers) for row, numbers in found.items()])


def format_long_table(found: dict[Row, dict[str, Any]]) -> str:
    """Return the table of long rows in Markdown, with the growth of temporaries from half of each length."""
    lines, temporaries = [], {}
    for row, numbers in found.items():
        fields = dict(flag.removeprefix("--config.").split("=") for flag in row.flags)
        length = int(fields["data.sequence_length"])
        own_bytes = numbers.get("temporary_bytes")
        series = (row.config, row.topology, fields["mesh.context_method"])
        half_length_bytes = temporaries.get((*series, length // 2))
        temporaries[*series, length] = own_bytes
        config, topology, mesh, *rest, _, _ = cells(row, numbers)
        lines.append(
            [
                *(config, topology, mesh.partition(" accumulation")[0], fields["mesh.context_method"], f"{length:,}"),
                fields["train.accumulation"],
                f"{own_bytes / 2**30:.2f}" if own_bytes else "",
                f"× {own_bytes / half_length_bytes:.2f}" if own_bytes and half_length_bytes else "",
                *rest,
            ]
        )
    return _markdown(LONG_COLUMNS, lines)


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def cells(row: Row, numbers: dict[str, Any]) -> list[str]:
    """Return the cells of one row; if libtpu refused the program, the error replaces the numbers."""
    shown = [Path(row.config).name.replace(".py", ""), row.topology]
    tail = [f"{numbers['process_seconds']:.0f} s", f"{numbers['host_bytes'] / 2**30:.1f}"]
    if "mesh" not in numbers:
        return [*shown, "", "", numbers["error"].partition(": ")[2], "", "", "", *tail]
    mesh = " ".join(f"{axis}={size}" for axis, size in numbers["mesh"].items() if size > 1)
    sent = sum(c["interconnect_bytes"] + c["network_bytes"] for c in numbers["collectives"].values())
    over = numbers["needed_bytes"] - numbers["chip"]["hbm_bytes"]
    return [
        *shown,
        f"{mesh} remat={numbers['remat']}" + f" accumulation={numbers['accumulation']}" * (numbers["accumulation"] > 1),
        f"{numbers['needed_bytes'] / 2**30:.1f} of {numbers['chip']['hbm_bytes'] / 2**30:.1f}",
        ("yes" if numbers["fits"] else f"no, {over / 2**30:.1f} too much") + ", without cuDNN" * numbers["cudnn"],
        f"{sent / 2**30:.1f}",
        f"{numbers['arithmetic_seconds']:.2f} s",
        f"≤ {numbers['mfu_causal']:.0%}",
        *tail,
    ]


if __name__ == "__main__":
    main()
