"""Estimate the memory and time of a config on devices that are not attached, by compiling its train step.

difftx plan --config=configs/scaling.py:diff-13.1b --topology=v5p:4x4x4 [--search]

The command allocates no arrays and reads no data. Its exit code is 2 if the step does not fit the devices' memory.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from difftx.commands.flags import Parser, add_config_flag, require_file_path, value_flag
from difftx.config import Config
from difftx.config.build import override
from difftx.config.fields import Positive, Rule
from difftx.config.recipes import load_config
from difftx.data.tokenizers import with_vocabulary
from difftx.errors import UserError
from difftx.files import write_atomically
from difftx.launch.topology import GIB, GPU_MEMORY_SHARE, GPUS, Topology, find_devices, parse_topology, prepare


def main(arguments: Sequence[str]) -> int:
    """Print the cost of the config. With --search, print the meshes and remat policies that fit."""
    parser = Parser("difftx plan", __doc__.splitlines()[0], "config")
    add_config_flag(parser)
    topologies = "such as v5p:4x4x4, v5e:16x16*2 (two slices), v6e:8x8, h200:8 or cpu:8"
    parser.add_argument("--topology", required=True, help=topologies)
    parser.add_argument("--search", action="store_true", help="try remat policies, accumulation and meshes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers")
    memory = f"memory per device in GiB; default: that of its kind, or {GPU_MEMORY_SHARE} of a GPU's"
    parser.add_argument("--hbm_gib", action=value_flag(Positive[float]), help=memory)
    share = Annotated[float, Rule(lambda share: 0 < share <= 1, " must be positive and at most 1")]
    speed = "assumed share of the largest speed"
    parser.add_argument("--efficiency", action=value_flag(share), default=0.6, help=speed)
    args, overrides = parser.parse(arguments)
    if args.json is not None:
        require_file_path("--json", args.json)
    topology = parse_topology(args.topology)
    config = with_slices(with_vocabulary(load_config(args.config, overrides)), topology)
    prepare(topology)
    chip = topology.chip
    usable = chip.hbm_bytes * (GPU_MEMORY_SHARE if topology.kind in GPUS else 1)
    chip = dataclasses.replace(chip, hbm_bytes=usable if args.hbm_gib is None else args.hbm_gib * GIB)

    # Imported after the flags are checked, because the imports are slow.
    from rich.console import Console

    from difftx.launch import estimate, search
    from difftx.model.abstract import count_parameters
    from difftx.model.architectures import describe_heads
    from difftx.model.flops import format_bytes
    from difftx.parallel.presets import apply_preset
    from difftx.training.fit import fit
    from difftx.training.state import state_bytes

    devices, title = find_devices(topology), f"{args.config} on {topology}"
    parameters = count_parameters(fit(config).model).total
    config = apply_preset(config, kind=devices[0].device_kind, devices=len(devices), parameters=parameters)
    print(f"{config.model.architecture}: {describe_heads(config.model)}; {parameters:,} parameters")
    whole = config.but(train={"trainable": (), "lora_rank": None})
    if whole != config:
        state, saved = (format_bytes(size) for size in (state_bytes(config), state_bytes(whole) - state_bytes(config)))
        print(f"the train state has {state}, {saved} less than if all parameters were trained")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        if args.search:
            estimates = search.search(
                config, devices, chip, report=lambda line: print(line, file=sys.stderr, flush=True)
            )
            console.print(estimate.search_table(estimates, title))
        else:
            estimates = [estimate.estimate(config, devices, chip)]
            console.print(estimate.plan_table(estimates[0], title, args.efficiency))
        if args.json is not None:
            write_atomically(args.json, json.dumps([e.to_dict() for e in estimates], indent=2) + "\n")
        if not estimates:
            raise UserError(f"{title}: no candidate fits in {chip.hbm_bytes / GIB:.2f} GiB; use more devices")
        if not estimates[0].fits:
            raise estimate.DoesNotFitError(estimates[0].needed_bytes, chip.hbm_bytes)
    except estimate.DoesNotFitError as error:
        raise UserError(f"{title}: {error}; --search looks for a mesh and a remat policy that fit") from error
    return 0


def with_slices(config: Config, topology: Topology) -> Config:
    """Return the config for the topology's number of slices.

    Set `mesh.slices` to this number. Also set `mesh.data`, unless it is -1 or a multiple of this number.
    """
    slices, data = topology.slices, config.mesh.data
    if config.mesh.slices == slices:
        return config
    if config.mesh.slices != 1:
        raise UserError(
            f"mesh.slices={config.mesh.slices}: --topology={topology} has {slices} slices; leave mesh.slices at 1"
        )
    if data != -1 and data % slices:
        data = slices
    return override(config, {"mesh.slices": str(slices), "mesh.data": str(data)})
