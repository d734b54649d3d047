"""Run train.py or eval.py as on a machine with a GPU whose attention kernels are fakes.

The variable FAKES is a JSON object: kernel → behaviour, a key of `BEHAVIOURS`. Each kernel that is traced in a child
process is appended as a line to the file FAKES_LOG. Each kernel that is traced in the process itself is printed.
FAKES_GPU is the name of the GPU. Without it, the machine seems to have a TPU. FAKES_SCRIPT may name another script.
"""

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from difftx.kernels import target, xla
from difftx.kernels.api import BACKENDS
from difftx.training import kernel_choice, kernel_measurement


def slow(q, *operands, **options):
    def wait(q):
        time.sleep(0.05)
        return q

    return xla.forward(jax.pure_callback(wait, jax.typeof(q), q), *operands, **options)


def raises(*operands, **options):
    raise RuntimeError("INTERNAL: no such instruction\nand a second line")


def hangs(*operands, **options):
    time.sleep(3600)


def crashes(*operands, **options):
    os.abort()


def wrong_gradient(*operands, **options):
    dq, dk, *rest = xla.backward(*operands, **options)
    return dq, -dk, *rest


# Behaviour → fields of the backend that differ from those of "xla".
BEHAVIOURS = {
    "right": {},
    "slow": {"forward": slow},
    "raises": {"forward": raises},
    "hangs": {"forward": hangs},
    "crashes": {"forward": crashes},
    "wrong": {"backward": wrong_gradient},
}


def logged(name, forward):
    def call(*operands, **options):
        if multiprocessing.parent_process() is None:
            print(f"traced {name}", flush=True)
        elif name != "xla":
            with Path(os.environ["FAKES_LOG"]).open("a") as file:
                print(name, file=file)
        return forward(*operands, **options)

    return call


real = BACKENDS["diff_attention"]["xla"]
for name, behaviour in json.loads(os.environ["FAKES"]).items():
    fake = dataclasses.replace(real, name=name, **BEHAVIOURS[behaviour])
    BACKENDS["diff_attention"][name] = dataclasses.replace(fake, forward=logged(name, fake.forward))
del BACKENDS["diff_attention"]["xla"]
BACKENDS["diff_attention"]["xla"] = dataclasses.replace(real, forward=logged("xla", real.forward))  # "xla" stays last.
kernel_measurement.gpu_identity = lambda: os.environ.get("FAKES_GPU")
if "FAKES_GPU" not in os.environ:
    kernel_choice.target = SimpleNamespace(platform=lambda: "tpu", device_kind=target.device_kind)
kernel_measurement.KERNEL_SECONDS = float(os.environ.get("FAKES_KERNEL_SECONDS", "20"))
kernel_measurement.DEADLINE_SECONDS = float(os.environ.get("FAKES_DEADLINE_SECONDS", "60"))

if __name__ == "__main__":
    from difftx.errors import run_command

    # Child processes import this file as their main module, so the script must not become it.
    run_command(importlib.import_module(os.environ.get("FAKES_SCRIPT", "train")).main)
