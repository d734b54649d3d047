"""Estimate the memory and time of a config on devices that are not attached, by compiling its train step.

python -m difftx plan --config=configs/scaling.py:diff-13.1b --topology=v5p:4x4x4 [--search]

The command allocates no arrays and reads no data. Its exit code is 2 if the step does not fit the devices' memory.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from difftx.commands.flags import parse_command
from difftx.config import Config
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.files import require_writable_file, write_atomically
from difftx.launch.topology import GIB, Topology, find_devices, parse_topology, prepare


def main(arguments: Sequence[str]) -> int:
    """Print the cost of the config; with --search, print the meshes and remat policies that fit."""
    parser = argparse.ArgumentParser(prog="difftx plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE.py[:ARG]", help="config file and its argument")
    parser.add_argument(
        "--topology", required=True, help="v5p:4x4x4, v5e:16x16, v5e:16x16*2 (two slices), v6e:8x8, h200:8, cpu:8, …"
    )
    parser.add_argument("--search", action="store_true", help="try remat, accumulation and meshes; best first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    parser.add_argument("--hbm_gib", type=float, help="memory of a device, GiB; default: that of its kind")
    parser.add_argument("--efficiency", type=float, default=0.6, help="share of the bound's speed for the likely days")
    parser.epilog = "--config.path.to.field=value changes a field; docs/config.md describes them all"
    args, overrides = parse_command(parser, arguments, "config")
    topology = parse_topology(args.topology)
    config = with_slices(load_config(args.config, overrides), topology)
    _check(args)
    prepare(topology)
    chip = topology.chip
    if args.hbm_gib is not None:
        chip = dataclasses.replace(chip, hbm_bytes=args.hbm_gib * GIB)

    # These modules are slow to import, so they are imported only after the flags are checked.
    from rich.console import Console

    from difftx.launch import estimate, search, tables
    from difftx.model.abstract import count_parameters
    from difftx.parallel.presets import apply_preset

    devices, what = find_devices(topology), f"{args.config} on {topology}"
    parameters = count_parameters(config.model).total
    config = apply_preset(config, kind=devices[0].device_kind, devices=len(devices), parameters=parameters)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        if args.search:
            found = search.search(config, devices, chip, report=lambda line: print(line, file=sys.stderr, flush=True))
            console.print(tables.search_table(found, what))
        else:
            found = [estimate.estimate(config, devices, chip)]
            console.print(tables.plan_table(found[0], what, args.efficiency))
    except estimate.DoesNotFitError as error:
        raise UserError(f"{what}: {error}; --search tries what fits") from error
    if args.json is not None:
        write_atomically(args.json, json.dumps([e.to_dict() for e in found], indent=2) + "\n")
    if not found:
        raise UserError(f"{what}: nothing that was tried fits {chip.hbm_bytes / GIB:.2f} GiB; take more devices")
    if not found[0].fits:
        error = estimate.DoesNotFitError(found[0].needed_bytes, chip.hbm_bytes)
        raise UserError(f"{what}: {error}; --search tries what fits")
    return 0


def with_slices(config: Config, topology: Topology) -> Config:
    """Return the config with `mesh.slices` of the topology, if the config leaves `mesh.slices` at 1.

    `mesh.data` becomes the number of slices, unless it is -1 or a multiple of that number.

    Raises:
        UserError: The config sets another number of slices.
    """
    asked, there = config.mesh.slices, topology.slices
    if asked == there:
        return config
    if asked != 1:
        raise UserError(f"mesh.slices={asked}: --topology={topology} has {there} slices; leave mesh.slices out")
    data = config.mesh.data if config.mesh.data == -1 or config.mesh.data % there == 0 else there
    return override(config, {"mesh.slices": str(there), "mesh.data": str(data)})


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency={args.efficiency} must lie between 0 and 1")
    if args.hbm_gib is not None and not args.hbm_gib > 0:
        raise UserError(f"--hbm_gib={args.hbm_gib} must be positive")
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json={args.json}: there is no folder {str(args.json.parent)!r}")
    if args.json is not None:
        require_writable_file(args.json)
